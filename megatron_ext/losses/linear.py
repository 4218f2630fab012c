"""Objectives evaluated from hidden states and heads, one tile of logits at a time.

B batch, Ts Tt tokens, Vp local columns, C chunks, D hidden, n rows of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.fused_evaluation import evaluate_together, weighted_sum
from megatron_ext.losses.lookup import CompletionSource
from megatron_ext.losses.microbatch_tiles import MicrobatchTiles
from megatron_ext.losses.objective import Objective, Scale
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.linear_form import linear_loss
from megatron_ext.ops.tile_plan import Tile, TilePlan


class AddedOutputs:
    """Outputs of the tiles added up to those of the microbatch: all their numbers are sums."""

    def __init__(self, plan: TilePlan) -> None:
        self._plan = plan
        self._first: Mapping[str, LossOutput] = {}
        self._sums: dict[torch.dtype, torch.Tensor] = {}
        self._chunk_loss: dict[str, list[torch.Tensor]] = {}

    def add(self, outputs: Mapping[str, LossOutput]) -> None:
        """Add the objectives' outputs on the next tile, which have no graph."""
        self._first = self._first or outputs
        numbers: dict[torch.dtype, list[torch.Tensor]] = {}
        for name, output in outputs.items():
            for number in _numbers(output):
                numbers.setdefault(number.dtype, []).append(number)
            if output.chunk_loss is not None:
                self._chunk_loss.setdefault(name, []).append(output.chunk_loss)
        # A launch for each dtype, not for each number.
        for dtype, of_tile in numbers.items():
            added = torch.stack(of_tile)
            self._sums[dtype] = added if dtype not in self._sums else self._sums[dtype] + added

    def outputs(self) -> dict[str, LossOutput]:
        """Outputs of the microbatch, by name."""
        sums = {dtype: iter(total.unbind()) for dtype, total in self._sums.items()}
        return {
            name: LossOutput(
                loss_sum=next(sums[output.loss_sum.dtype]),
                count=next(sums[output.count.dtype]),
                metrics={
                    metric: (next(sums[total.dtype]), next(sums[count.dtype]))
                    for metric, (total, count) in output.metrics.items()
                },
                chunk_loss=self._all_chunks(name),
            )
            for name, output in self._first.items()
        }

    def _all_chunks(self, name: str) -> torch.Tensor | None:
        if name not in self._chunk_loss:
            return None
        by_tile = torch.cat(self._chunk_loss[name])
        whole = torch.empty_like(by_tile)
        whole[self._plan.chunks] = by_tile
        return whole


def _numbers(output: LossOutput) -> Iterator[torch.Tensor]:
    """Scalars of an output, in the order in which ``AddedOutputs.outputs`` takes them."""
    yield output.loss_sum
    yield output.count
    for total, count in output.metrics.values():
        yield total
        yield count


class TeacherTiles:
    """Teacher targets of any kind, cut to tiles; kind ``hidden`` becomes the logits of a tile.

    These logits are in one buffer [n, Vp], which the next tile overwrites.
    """

    def __init__(self, teacher: TeacherTargets | None, plan: TilePlan) -> None:
        self._teacher, self._plan = teacher, plan
        self._buffer: torch.Tensor | None = None
        if teacher is not None and teacher.hidden is not None and teacher.head_weight is not None:
            head = teacher.head_weight
            self._buffer = head.new_empty(plan.largest[1], len(head))

    def of(self, tile: Tile) -> TeacherTargets | None:
        """Targets of a tile's rows, as one sample [1, n]."""
        teacher = self._teacher
        if teacher is None:
            return None
        index = self._plan.teacher_index(tile)
        if self._buffer is not None:
            assert teacher.hidden is not None
            logits = self._buffer[: tile.teacher_count]
            teacher.logits_of(teacher.hidden.flatten(0, 1)[index], out=logits)
            marks = teacher.stop_marks
            logits = teacher.with_stops(logits, None if marks is None else marks.flatten()[index])
            return TeacherTargets(kind="logits", shard=teacher.shard, logits=logits[None])
        cut: dict[str, Any] = {}
        for item in fields(teacher):
            value = getattr(teacher, item.name)
            if isinstance(value, torch.Tensor):
                cut[item.name] = value.flatten(0, 1)[index][None]
        return replace(teacher, **cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOutput:
    """One microbatch's share of a loss."""

    total: torch.Tensor
    """``sum over parts: scale * loss_sum``, fp32 scalar with a graph; the same on every rank of
    the shards' group."""

    parts: dict[str, LossOutput]
    """Sum, count and metrics of every objective, equal to those of whole logits; without a
    graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDistillation:
    """Objectives summed, each with a scale, from the student's hidden states and head.

    The same numbers as from whole logits, with one tile of them in memory: see
    ``ops/linear_form`` for the method and its cost. A teacher of kind ``hidden`` is multiplied by
    its head tile by tile as well.

    The forward computes the gradient, so weights and global counts belong into the scales; counts
    are known ahead (``losses/base.py``).
    """

    objectives: Mapping[str, Objective]
    """Name -> objective, as ``{"kd": ProjectedKLLoss(), "ce": NextTokenLoss()}``."""

    tile_rows: int = 2048
    """Most rows of a tile, of either model."""

    into_main_grad: bool = False
    """See ``linear_loss``."""

    def __post_init__(self) -> None:
        if not self.objectives:
            raise LossError("a linear form needs an objective", got="none")
        for name, objective in self.objectives.items():
            reason = objective.why_no_linear_form
            if reason is not None:
                raise LossError(
                    f"the objective {name} has no linear form",
                    got=f"{type(objective).__name__}: {reason}",
                    expected="a sum over chunks or labels, each from rows of its own",
                    fix="call it with logits",
                )

    def tiles(self, known: KnownAhead, table: CompletionSource | None = None) -> MicrobatchTiles:
        """Cut a microbatch, on the CPU, where its data is loaded.

        Raises:
            LossError: It cannot be cut, see ``MicrobatchTiles.of``.
        """
        objectives = list(self.objectives.values())
        return MicrobatchTiles.of(
            known,
            rows=self.tile_rows,
            paired=any(objective.needs.same_tokenizer for objective in objectives)
            or known.alignment is None,
            with_labels=any(objective.sums_over == "tokens" for objective in objectives),
            with_rows_behind=any(objective.reads_behind for objective in objectives),
            table=table,
        )

    def __call__(
        self,
        inputs: DistillationInputs,
        tiles: MicrobatchTiles,
        scales: Mapping[str, Scale],
    ) -> LinearOutput:
        """The loss of a microbatch.

        Args:
            inputs: With ``student_hidden`` and ``student_head_weight``; ``student_logits`` is
                ``no_logits(...)``.
            tiles: Of this microbatch, on the device of the inputs.
            scales: Factor of each objective's sum: its weight over its global count. A tensor is a
                scalar on that device without a graph.

        Collectives: those of the objectives' forwards and backwards, in every tile.

        Raises:
            LossError: Inputs that do not fit, or scales for other objectives.
        """
        hidden, weight = inputs.student_hidden, inputs.student_head_weight
        if hidden is None or weight is None:
            raise LossError(
                "a linear form needs the student's hidden states and head",
                got=f"no {'student_hidden' if hidden is None else 'student_head_weight'}",
            )
        if scales.keys() != self.objectives.keys():
            raise LossError(
                "the scales are not those of the objectives",
                got=", ".join(scales),
                expected=", ".join(self.objectives),
            )
        if inputs.projection is not None and inputs.projection.learned is not None:
            raise LossError(
                "a linear form gives no gradient to a learned projection",
                got="a projection with learned entries",
                fix="call the objective with logits",
            )
        run = _Run(self.objectives, scales, inputs, tiles)
        total = linear_loss(
            hidden.flatten(0, 1), weight, run, tiles.plan, into_main_grad=self.into_main_grad
        )
        return LinearOutput(total=total, parts=run.added.outputs())


class _Run:
    """One pass over the tiles, which adds up the objectives' outputs."""

    def __init__(
        self,
        objectives: Mapping[str, Objective],
        scales: Mapping[str, Scale],
        inputs: DistillationInputs,
        tiles: MicrobatchTiles,
    ) -> None:
        self._objectives, self._scales = objectives, scales
        self._inputs = tiles.inputs(inputs)
        self._teacher = TeacherTiles(inputs.teacher, tiles.plan)
        self.added = AddedOutputs(tiles.plan)

    def __call__(
        self, tile: Tile, logits: torch.Tensor, *, needs_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = replace(
            next(self._inputs), student_logits=logits[None], teacher=self._teacher.of(tile)
        )
        gradient = logits if needs_gradient else None
        outputs = evaluate_together(self._objectives, self._scales, inputs, gradient=gradient)
        self.added.add(outputs)
        return weighted_sum(outputs, self._scales), gradient


def no_logits(hidden: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Placeholder for the logits [B, Ts, Vp] of ``hidden`` [B, Ts, D], which are not made.

    One NaN, expanded: shape, dtype and device are right, and any use shows.
    """
    nan = hidden.detach().new_full((), torch.nan)
    return nan.expand(*hidden.shape[:2], shard.width)

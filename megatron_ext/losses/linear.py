"""Objectives evaluated from hidden states and heads, one tile of logits at a time.

B batch, Ts Tt tokens, Vp local columns, C chunks, D hidden, n rows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.completions import CompletionTable
from megatron_ext.losses.fused_evaluation import evaluate_together
from megatron_ext.losses.microbatch_tiles import MicrobatchTiles
from megatron_ext.losses.objective import Objective, Scale
from megatron_ext.losses.prefix_table import PrefixTable
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.linear_form import linear_loss
from megatron_ext.ops.tile_plan import Tile, TilePlan


class AddedOutputs:
    """Outputs of the tiles added up to those of the microbatch: all their numbers are sums."""

    def __init__(self, plan: TilePlan) -> None:
        self._plan = plan
        self._outputs: dict[str, LossOutput] = {}
        self._chunk_loss: dict[str, torch.Tensor] = {}

    def add(self, tile: Tile, outputs: Mapping[str, LossOutput]) -> None:
        """Add the objectives' outputs on a tile, which have no graph."""
        for name, output in outputs.items():
            before = self._outputs.get(name)
            self._outputs[name] = output if before is None else _sum(before, output)
            if output.chunk_loss is not None:
                whole = self._chunk_loss.get(name)
                if whole is None:
                    whole = output.chunk_loss.new_zeros(len(self._plan.chunks))
                    self._chunk_loss[name] = whole
                whole[self._plan.chunks[tile.chunks]] = output.chunk_loss

    def outputs(self) -> dict[str, LossOutput]:
        """Outputs of the microbatch, by name."""
        return {
            name: replace(output, chunk_loss=self._chunk_loss.get(name))
            for name, output in self._outputs.items()
        }


def _sum(one: LossOutput, other: LossOutput) -> LossOutput:
    return LossOutput(
        loss_sum=one.loss_sum + other.loss_sum,
        count=one.count + other.count,
        metrics={
            name: (total + other.metrics[name][0], count + other.metrics[name][1])
            for name, (total, count) in one.metrics.items()
        },
    )


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

    def tiles(
        self, known: KnownAhead, table: CompletionTable | PrefixTable | None = None
    ) -> MicrobatchTiles:
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
        self.added.add(tile, outputs)
        sums = [self._scales[name] * output.loss_sum for name, output in outputs.items()]
        return torch.stack(sums).sum(), gradient


def no_logits(hidden: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Placeholder for the logits [B, Ts, Vp] of ``hidden`` [B, Ts, D], which are not made.

    One NaN, expanded: shape, dtype and device are right, and any use shows.
    """
    nan = hidden.detach().new_full((), torch.nan)
    return nan.expand(*hidden.shape[:2], shard.width)

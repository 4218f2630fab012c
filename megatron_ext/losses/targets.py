"""Teacher targets: logits, hidden states, top-k logits or label log-probabilities.

B batch, Tt tokens, Vp local columns, D hidden, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import torch

from megatron_ext.distributed.shard_collectives import group_size, recut_columns
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.stop_set import StopSet, TopK
from megatron_ext.ops.divergence import log1mexp
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.top_columns import top_log_probs

TargetKind = Literal["logits", "hidden", "topk", "label"]

_TENSORS: Final[dict[TargetKind, tuple[str, ...]]] = {
    "logits": ("logits",),
    "hidden": ("hidden", "head_weight"),
    "topk": ("topk_ids", "topk_logits", "log_normaliser"),
    "label": ("label_log_probs",),
}
"""Tensors that each kind requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """A frozen teacher's prediction at every position, at temperature 1."""

    kind: TargetKind
    """``logits``: this rank's columns. ``hidden``: last hidden states and this rank's head rows.
    ``topk``: the largest logits of the whole vocabulary, the same on every rank, with their
    log-normaliser. ``label``: only the log-probability of the observed next token."""

    shard: VocabShard
    """Teacher vocabulary range of this rank."""

    logits: torch.Tensor | None = None
    """[B, Tt, Vp]"""

    hidden: torch.Tensor | None = None
    """[B, Tt, D]: 2 D bytes a token in bf16, where full logits take 2 Vt."""

    head_weight: torch.Tensor | None = None
    """[Vp, D]"""

    logit_cap: float | None = None
    """Cap of the logits that hidden states and head make, see ``capped_``; None for none."""

    states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """[B, Tt, D] outputs of layers below the last, by number from 1, of kind ``hidden``."""

    topk_ids: torch.Tensor | None = None
    """[B, Tt, K] int64: global columns, each once in a row."""

    topk_logits: torch.Tensor | None = None
    """[B, Tt, K]: their logits."""

    log_normaliser: torch.Tensor | None = None
    """[B, Tt] fp32: log-sum-exp of all real columns' logits, so that the mass of the tail is exact;
    it holds at temperature 1 only."""

    label_log_probs: torch.Tensor | None = None
    """[B, Tt] fp32: log p of the token that each position predicts, 0 where there is none; of kind
    ``topk`` NaN where it is not known."""

    boundary_log_probs: torch.Tensor | None = None
    """[B, Tt] fp32: log p that the next token begins a word; kind ``label``, where known."""

    stops: StopSet | None = None
    """Stop tokens that are one event in some rows of the logits of hidden states."""

    stop_marks: torch.Tensor | None = None
    """int64 [B, Tt]: one more than the label of each such row, 0 elsewhere; with ``stops``."""

    def __post_init__(self) -> None:
        if self.kind not in _TENSORS:
            raise LossError(
                "unknown kind of teacher targets", got=repr(self.kind), expected=tuple(_TENSORS)
            )
        missing = [name for name in _TENSORS[self.kind] if getattr(self, name) is None]
        if missing:
            raise LossError(
                f"teacher targets of kind {self.kind!r} lack their tensors",
                got=f"no {', '.join(missing)}",
                expected=" and ".join(_TENSORS[self.kind]),
            )

    @property
    def positions(self) -> torch.Size:
        """[B, Tt]"""
        first: torch.Tensor = getattr(self, _TENSORS[self.kind][0])
        return first.shape[:2]

    def to_logits(self) -> torch.Tensor:
        """This rank's logits [B, Tt, Vp], computed from the hidden states if necessary.

        Raises:
            LossError: The targets are of a kind that does not have them.
        """
        if self.logits is not None:
            return self.logits
        if self.hidden is None or self.head_weight is None:
            raise LossError(
                "the objective needs all of the teacher's logits",
                got=f"targets of kind {self.kind!r}",
                expected="kind 'logits' or 'hidden'",
            )
        return self.with_stops(self.logits_of(self.hidden), self.stop_marks)

    @torch.no_grad()
    def logits_of(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's logits [..., Vp] of some hidden states [..., D], in the head's dtype and in
        ``out`` if given."""
        assert self.head_weight is not None, "targets of kind hidden have it"
        hidden = hidden.to(self.head_weight.dtype)
        return capped_(torch.matmul(hidden, self.head_weight.t(), out=out), self.logit_cap)

    def merging(self, stops: StopSet, labels: torch.Tensor, rows: torch.Tensor) -> TeacherTargets:
        """Targets in which the label has the mass of all ``stops``, and the others have none.

        Logits are overwritten. Of hidden states, logits are merged whenever they are made. Of
        top-k targets the stop tokens among the K are merged; of labels alone nothing is known.

        Args:
            labels: int64 [B, Tt] the token that each position predicts.
            rows: bool [B, Tt]; of these, rows whose label is no stop token stay as they are.

        Collectives: for logits, two all-reduces of [B, Tt].
        """
        if not len(stops.ids) or self.kind == "label":
            return self
        rows = rows & torch.isin(labels, stops.ids)
        if self.kind == "topk":
            ids, logits, normaliser = self.topk_ids, self.topk_logits, self.log_normaliser
            assert ids is not None
            assert logits is not None
            assert normaliser is not None
            topk = TopK(ids, logits, normaliser)
            logits, label = stops.merge_topk(topk, self.label_log_probs, labels, rows)
            return replace(self, topk_logits=logits, label_log_probs=label)
        marks = torch.where(rows, labels + 1, 0)
        if self.kind == "hidden":
            return replace(self, stops=stops, stop_marks=marks)
        assert self.logits is not None
        return replace(self, logits=stops.merge_(self.logits, marks))

    def with_stops(self, logits: torch.Tensor, marks: torch.Tensor | None) -> torch.Tensor:
        """Logits [..., Vp] made of hidden states, changed in place where ``marks`` [...] say so."""
        if self.stops is None or marks is None:
            return logits
        return self.stops.merge_(logits, marks)

    def logits_over(self, shard: VocabShard) -> torch.Tensor:
        """``to_logits`` of the ids of another shard of the same ids, such as the student's.

        Models of one tokenizer may have different padding, and so different cuts over ranks.

        Returns:
            [B, Tt, n] whose first ``shard.valid_width`` columns are those ids; those behind are
            padding. One all-to-all where the cuts differ, of the columns that change ranks; a run
            has one cut (``training.objective.head_rows``).
        """
        logits = self.to_logits()
        if shard.width == self.shard.width or group_size(shard.group) == 1:
            return logits
        return recut_columns(logits, shard.width, shard.vocab_size, shard.group)


def topk_targets(
    logits: torch.Tensor, k: int, shard: VocabShard, *, implementation: Implementation = "auto"
) -> TeacherTargets:
    """Targets of kind ``topk`` from logits: the ``k`` most probable tokens of each position.

    ``topk_logits`` are relative to the row's largest logit, which changes no probability and keeps
    ``log_normaliser`` small enough for fp32 to hold all its digits.

    Args:
        logits: [B, Tt, Vp], this rank's columns, any float dtype.
        shard: Shard of the teacher's vocabulary.

    Collectives: one all-gather of int64 [B Tt, min(k, Vp) + 1].

    Raises:
        LossError: ``k`` is not between 1 and the vocabulary.
    """
    top = top_log_probs(logits.flatten(0, 1), k, shard, implementation=implementation)
    positions = logits.shape[:2]
    return TeacherTargets(
        kind="topk",
        shard=shard,
        topk_ids=top.token_id.unflatten(0, positions),
        topk_logits=(top.logit - top.normaliser.peak[:, None]).unflatten(0, positions),
        log_normaliser=top.normaliser.log_sum.unflatten(0, positions),
    )


def topk_log_probs(teacher: TeacherTargets, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Log-probabilities of a ``topk`` teacher's tokens and of all others as one, at temperature 1.

    The others' mass is the remainder to the log-normaliser, exact up to rounding of the targets.

    Args:
        kept: bool [B * T, K], tokens that keep an entry of their own; None: all.

    Returns:
        [B * T, K + 1] in fp32 (fp64 for fp64 targets), the others last; -inf at tokens not kept.
    """
    logits, normaliser = teacher.topk_logits, teacher.log_normaliser
    assert logits is not None
    assert normaliser is not None
    dtype = torch.promote_types(torch.float32, torch.promote_types(logits.dtype, normaliser.dtype))
    log_p = logits.flatten(0, 1).to(dtype) - normaliser.flatten().to(dtype)[:, None]
    if kept is None and logits.shape[-1] >= teacher.shard.vocab_size:
        return torch.nn.functional.pad(log_p, (0, 1), value=-torch.inf)
    if kept is not None:
        log_p = log_p.masked_fill(~kept, -torch.inf)
    named = torch.logsumexp(log_p, dim=-1, keepdim=True)
    return torch.cat([log_p, log1mexp(named)], dim=-1)


def check_tail_temperature(temperature: float, *, objective: str) -> None:
    """Check that a ``topk`` teacher's tail is known at the temperature.

    Raises:
        LossError: It is not 1.
    """
    if temperature != 1.0:
        raise LossError(
            f"the objective {objective} cannot use teacher targets of kind 'topk' at this "
            "temperature: their log-normaliser is that of temperature 1, and tells no other's",
            got=temperature,
            expected=1.0,
            fix="set the temperature to 1, or give the teacher's logits or hidden states",
        )


def capped_(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap tanh(logits / cap)``, in place of logits without a graph; as they are without a cap."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

"""Operands of the prefix masses: columns of a pair of vocabularies, and rows of a microbatch.

Vps Vpt local columns, N spans or sums, K steps, P prefixes, E pairs of a prefix and a token, X
columns that cross ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.partition_kl import SharedColumns


class StartColumns(NamedTuple):
    """Student column of each of this rank's teacher columns, for one pair of shards.

    A teacher column of another rank's student column goes to a slot behind the own ones; slots are
    by rank and student column, and one serves all columns that share it.
    """

    target: torch.Tensor
    """int64 [Vpt valid]: own student column; ``Vps`` for none; ``Vps + 1 + x`` for the x-th slot of
    those that leave."""

    column: torch.Tensor
    """int32 [Vpt valid]: the columns by their target, ascending."""

    pointers: torch.Tensor
    """int32: first place in ``column`` of each target, and the end."""

    by_size: torch.Tensor
    """int32: targets by their number of columns, the largest first."""

    arriving: torch.Tensor
    """int64 [X]: own student column of each slot that comes from other ranks, by rank."""

    sent_counts: tuple[int, ...]
    """Number of slots by the rank that they go to, on the host; () if none of the group's ranks
    sends any."""

    received_counts: tuple[int, ...]

    shared: SharedColumns
    """Student columns that are compared one by one, in both models' rows: the teacher's are masses
    of ``PrefixTargets``."""

    shard: VocabShard
    """Columns of those masses."""

    event_count: int
    """Number of such columns over all ranks, on the host."""

    has_rest: bool
    """Whether any student column of any rank is not, padding apart; on the host."""


class PrefixColumns(NamedTuple):
    """Teacher columns that begin with each prefix."""

    starts: StartColumns

    pointers: torch.Tensor
    """int64 [P + 1] first pair of each prefix."""

    column: torch.Tensor
    """int32 [E]: this rank's teacher column, -1 where another rank has it."""

    slot: torch.Tensor
    """int32 [E]: see ``PrefixTable.slot``."""


class PrefixSums(NamedTuple):
    """Prefixes whose teacher tokens are summed up."""

    number: torch.Tensor
    """int64 [N]"""

    pair_counts: tuple[int, ...]
    """[N] teacher tokens that begin with each, on the host."""

    slot_counts: torch.Tensor
    """int64 [N] student tokens behind each."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PrefixSums:
        """The same with changed tensors."""
        return self._replace(number=change(self.number), slot_counts=change(self.slot_counts))


class Spans(NamedTuple):
    """Labels that go on beyond the teacher's token in which they begin.

    The mass of such a label is that of the teacher's tokens that it covers, times that of all
    tokens that begin with what is left of it. It is taken from where the first covered token alone
    would count.
    """

    row: torch.Tensor
    """int64 [N]: row that has the label, each once."""

    gains: torch.Tensor
    """int64 [N]: event that gets the mass."""

    loses: torch.Tensor
    """int64 [N]: event that it is taken from; -1 for the rest."""

    step_span: torch.Tensor
    """int64 [K]: span of each covered teacher token."""

    step_row: torch.Tensor
    """int64 [K]: teacher row that predicts it."""

    step_label: torch.Tensor
    """int64 [K]"""

    end_row: torch.Tensor
    """int64 [N]: teacher row that predicts the token in which the label ends."""

    ends: PrefixSums
    """Part of that token that the label covers."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Spans:
        """The same with changed tensors."""
        return Spans(*map(change, self[:7]), self.ends.each(change))  # type: ignore[call-arg, arg-type]


class TargetRows(NamedTuple):
    """Teacher rows of one microbatch, and what is made of them. S starts, M middles."""

    start: torch.Tensor
    """int64 [S]: rows that predict from the student's bytes on."""

    middle: torch.Tensor
    """int64 [M]: rows that predict the token within which a student row begins."""

    prefixes: PrefixSums
    """[M] What was said of that token before."""

    pointers: tuple[int, ...]
    """[M + 1] start of each middle's events, at least as many as its slots, on the host."""

    event_counts: torch.Tensor
    """int64 [M] number of each middle's events."""

    spans: Spans
    """Rows count over starts and then middles. ``gains`` and ``loses`` of a start are student
    columns over all shards, of a middle indices among all its events."""

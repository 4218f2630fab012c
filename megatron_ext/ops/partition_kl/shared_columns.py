"""Shared tokens in a rank's columns, and the exchange of logits of pairs that cross ranks.

Vps Vpt local columns, Vt teacher columns over all shards, N shared tokens, X columns that cross, W
words of 32 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.distributed.shard_collectives import group_size
from megatron_ext.distributed.vocab_parallel import (
    MadeOnce,
    VocabShard,
    columns_until_last,
    leading_columns,
)


class ColumnSet(NamedTuple):
    """Columns of a rank that belong together in many rows, made once a run."""

    mask: torch.Tensor
    """bool [Vp]"""

    words: torch.Tensor
    """int32 [W]: column v is bit v % 32 of word v // 32."""

    leading: int
    """Columns before the first that is not in it; with pairs side by side, these are all."""

    end: int
    """Columns up to the last that is in it."""

    @classmethod
    def of(cls, mask: torch.Tensor) -> ColumnSet:
        """The set with this mask; waits for the device."""
        places = torch.arange(32, dtype=torch.int32, device=mask.device)
        power = torch.ones_like(places).bitwise_left_shift_(places)
        padded = torch.nn.functional.pad(mask.int(), (0, -len(mask) % 32)).view(-1, 32)
        words = (padded * power).sum(dim=1, dtype=torch.int32)
        return cls(mask, words, leading_columns(mask), columns_until_last(mask))


class SharedColumns(NamedTuple):
    """Pairs of a student and a teacher column, cut to this rank's shards."""

    student: ColumnSet

    teacher: ColumnSet

    partner: torch.Tensor
    """int32 [Vps]: this rank's teacher column of each student column, ``-2 - x`` for the x-th
    column from other ranks, -1 where the token is not shared."""

    sent: torch.Tensor
    """int64: this rank's teacher columns with partners on other ranks, by rank and student
    token."""

    sent_counts: tuple[int, ...]
    """Number of ``sent`` columns by rank, on the host; () if no pair of the group crosses."""

    received_counts: tuple[int, ...]

    crossing: int
    """Most columns that a rank of the group sends or receives, the same on each; on the host."""

    student_token: torch.Tensor
    """int64 [Vt]: the student token of each teacher token, -1 for none."""


_CACHE: MadeOnce[SharedColumns] = MadeOnce()


def shared_columns(
    common_student: torch.Tensor,
    common_teacher: torch.Tensor,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
) -> SharedColumns:
    """Cut pairs of global ids, int64 [N] each, to this rank's columns.

    Cached as long as ``common_student`` lives, since the counts wait for the device. No
    collectives: every rank derives them from all pairs.
    """
    return _CACHE(common_student, common_teacher, (student_shard, teacher_shard), _tables)


def _tables(
    student: torch.Tensor,
    teacher: torch.Tensor,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
) -> SharedColumns:
    ranks = group_size(student_shard.group)
    token = student.new_full((teacher_shard.width * ranks,), -1).index_copy_(0, teacher, student)
    partner = student.new_full((student_shard.width + 1,), -1)
    own_student = _own_columns(student, student_shard)
    own_teacher = _own_columns(teacher, teacher_shard)
    sets = (
        ColumnSet.of(_mask(own_student, student_shard.width)),
        ColumnSet.of(_mask(own_teacher, teacher_shard.width)),
    )
    # Columns of other ranks share one slot after the real ones.
    partner[own_student] = torch.where(own_teacher < teacher_shard.width, own_teacher, -1)
    if ranks == 1:
        return SharedColumns(*sets, partner[:-1].int(), student[:0], (), (), 0, token)
    owners = student // student_shard.width, teacher // teacher_shard.width
    rank = student_shard.start // student_shard.width
    apart = owners[0] != owners[1]
    traffic = torch.bincount((owners[1] * ranks + owners[0])[apart], minlength=ranks**2)
    counts = traffic.view(ranks, ranks).tolist()
    leaving = _in_order(apart & (owners[1] == rank), owners[0], student)
    arriving = _in_order(apart & (owners[0] == rank), owners[1], student)
    slots = torch.arange(len(arriving), device=student.device)
    partner[own_student[arriving]] = -2 - slots
    received = [row[rank] for row in counts]
    crossing = max(max(map(sum, counts)), max(map(sum, zip(*counts, strict=True))))
    return SharedColumns(
        *sets,
        partner[:-1].int(),
        own_teacher[leaving],
        tuple(counts[rank]) if crossing else (),
        tuple(received) if crossing else (),
        crossing,
        token,
    )


def _own_columns(tokens: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """This rank's column of each token, int64 [N], the shard's width for another rank's."""
    local = tokens - shard.start
    return torch.where((local < 0) | (local >= shard.width), shard.width, local)


def _mask(own: torch.Tensor, width: int) -> torch.Tensor:
    mask = torch.zeros(width + 1, dtype=torch.bool, device=own.device)
    return mask.index_fill_(0, own, True)[:-1]


def _in_order(chosen: torch.Tensor, owner: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Indices of the chosen pairs, ordered by owner and then by student token."""
    index = chosen.nonzero()[:, 0]
    index = index[torch.argsort(student[index], stable=True)]
    return index[torch.argsort(owner[index], stable=True)]


def crossing_logits(
    teacher_logits: torch.Tensor, rows: torch.Tensor, shared: SharedColumns, shard: VocabShard
) -> torch.Tensor:
    """Logits [C', X] of the columns that come from other ranks, in the teacher's dtype.

    One all-to-all of the crossing columns; none where no pair crosses.

    Args:
        teacher_logits: [Tt, Vpt]
        rows: int64 [C']
    """
    if not shared.crossing:
        return teacher_logits.new_empty(len(rows), 0)
    sent = teacher_logits.detach()[rows[None], shared.sent[:, None]]
    arrived = sent.new_empty(sum(shared.received_counts), len(rows))
    dist.all_to_all_single(
        arrived,
        sent,
        list(shared.received_counts),
        list(shared.sent_counts),
        group=shard.group,
    )
    return arrived.t().contiguous()

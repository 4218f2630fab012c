"""Order in which kernels read a projection's entries. Vps Vpt local columns, D summed columns.

Most tokens map to one token alone: their columns are compared directly. The entries of the other
columns are summed first, in a fixed order: N sums of E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.distributed.vocab_parallel import VocabShard

SUMS: Final = 32
"""Number of sums that a program makes at once, or of entries of a longer one."""


class Segments(NamedTuple):
    """Sums of entries, as int32 tensors, in the order of their targets, or of their lengths rounded
    up to powers of two."""

    offsets: torch.Tensor
    """[N + 1]: the i-th sum is over entries ``offsets[i]:offsets[i + 1]``."""

    target: torch.Tensor
    """[N] place of the i-th sum, a permutation."""

    source: torch.Tensor
    """[E] index of the summed value, ascending within a sum."""

    entry: torch.Tensor
    """[E] index of its weight among this rank's entries."""

    blocks: torch.Tensor
    """[B, 2] work of each program: its first sum, and the one after its last. One of more than
    ``SUMS`` entries is alone, in the order of lengths."""

    @classmethod
    def of(
        cls,
        target: NDArray[np.int64],
        source: NDArray[np.int64],
        entry: NDArray[np.int64],
        count: int,
        device: torch.device | str,
        *,
        in_order: bool = False,
    ) -> Segments:
        """Build from the target, source and place of each entry; there are ``count`` targets.

        Args:
            in_order: Keep the targets' order, whatever the sums' lengths.
        """
        lengths = np.bincount(target, minlength=count)
        order = np.arange(count)
        if not in_order:
            order = np.argsort(np.ceil(np.log2(np.maximum(lengths, 1))), kind="stable")
        rank = np.empty(count, dtype=np.int64)
        rank[order] = np.arange(count)
        by_sum = np.lexsort((source, rank[target]))
        offsets = np.zeros(count + 1, dtype=np.int64)
        offsets[1:] = np.cumsum(lengths[order])
        short = count if in_order else int((lengths <= SUMS).sum())
        first = np.concatenate([np.arange(0, short, SUMS), np.arange(short, count)])
        blocks = np.stack([first, np.append(first[1:], count)[: len(first)]], axis=1)
        arrays = (offsets, order, source[by_sum], entry[by_sum], blocks)
        tensors = (torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays)
        return cls(*tensors)


NO_PARTNER: Final = -1
"""Partner of a student column without an entry."""

_NARROW: Final = 1 << 13


def pair_block(width: int) -> int:
    """Columns that a program of ``single_kernel`` reads at once, of a student's ``width``."""
    return 512 if width >= _NARROW else 16


def pair_parts(width: int) -> int:
    """Programs that share a chunk."""
    return 16 if width >= _NARROW else 1


_RESIDUAL_STEP: Final = 16
"""Columns whose masks are one: a thread loads 16 bytes."""

_UNIT_SLACK: Final = 1e-6
"""Tolerance of row sums: rows of fp32 shares sum to 1 up to rounding and are taken to be exactly
1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlan:
    """One rank's plan, made once on the host from the whole projection and the layout.

    Summed columns are the reachable ones that are no partner of a direct pair, if this rank holds
    them or has an entry in them. Their slots: first the ``crossing`` columns, those with an entry
    on a rank that does not hold them, in the same order on every rank; then this rank's own.
    """

    has_unit_rows: bool
    """Whether every row on every rank is empty or sums to 1, up to rounding."""

    partner: torch.Tensor
    """int32 [Vps]: local teacher column of a direct pair, whose two columns have this one entry, of
    1, and no other on any rank; ``NO_PARTNER`` for an empty row; ``-2 - r`` for residual row r,
    where the other rows are numbered in ascending order."""

    mapped: torch.Tensor
    """bool [Vps]: student columns with an entry."""

    aligned: int | None
    """Number of leading columns of both models that are direct pairs, each with its own number, if
    no other column is one and the residual rows come next; None in any other order. It is a
    multiple of ``pair_block``, not 0: pairs of a last, partial block are summed columns instead."""

    crossing: int
    """X, the same on every rank."""

    home: torch.Tensor
    """int32 [D]: local teacher column of each slot, -1 where another rank holds it."""

    slot: torch.Tensor
    """int32 [Vt]: slot of a teacher column over all shards, -1 where it has none here."""

    residual: torch.Tensor
    """int32 [R]: local student column of each residual row, -1 for those that are 0."""

    by_column: Segments
    """For each slot, the residual rows with an entry in it."""

    by_row: Segments
    """For each residual row, the slots in which it has an entry."""

    direct_pairs: int

    scratch_width: int
    """Largest ``D + R`` of any rank: fp32 numbers that a chunk needs."""

    @property
    def residual_rows(self) -> int:
        """R, number of residual rows; in an aligned plan up to 15 more, which are 0."""
        return len(self.by_row.target)

    def sum_weights(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of the CSR ``weight`` [Vps, Vt] in the order of the sums by column and by row."""
        values = weight.values()
        by_column, by_row = (
            values.index_select(0, sums.entry) for sums in (self.by_column, self.by_row)
        )
        return by_column, by_row

    @classmethod
    def of(
        cls,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32],
        values: NDArray[np.float32],
        *,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        device: torch.device | str = "cpu",
    ) -> ColumnPlan:
        """Build from a CSR matrix [Vs, Vt] without padding. No collectives.

        Entries are indexed among this rank's by row and column, as ``values()`` of its ``weight``.
        """
        whole = _Entries.of(indptr, indices, values, student_shard, teacher_shard)
        crosses = np.zeros(whole.column_count, dtype=np.bool_)
        crosses[whole.column[~whole.direct & (whole.student_rank != whole.teacher_rank)]] = True
        crossing = np.flatnonzero(crosses)
        rank = student_shard.start // student_shard.width
        local = np.unique(whole.column[~whole.direct & (whole.teacher_rank == rank)])
        columns = np.concatenate([crossing, local[~crosses[local]]])
        slot = np.full(whole.column_count, -1, dtype=np.int64)
        slot[columns] = np.arange(len(columns))
        home = columns - teacher_shard.start
        home[(home < 0) | (home >= teacher_shard.width)] = -1

        here = whole.student_rank == rank
        direct, summed = here & whole.direct, here & ~whole.direct
        row = whole.row - student_shard.start
        partner = np.full(student_shard.width, NO_PARTNER, dtype=np.int64)
        partner[row[direct]] = whole.column[direct] - teacher_shard.start
        residual, number = np.unique(row[summed], return_inverse=True)
        partner[residual] = -2 - np.arange(len(residual))
        residual_rows, aligned = len(residual), whole.aligned[rank]
        if aligned is not None:
            residual_rows = -(-residual_rows // _RESIDUAL_STEP) * _RESIDUAL_STEP
        entry_slot = slot[whole.column[summed]]
        return cls(
            has_unit_rows=_has_unit_rows(indptr, values),
            partner=_int32(partner, device),
            mapped=torch.from_numpy(partner != NO_PARTNER).to(device),
            aligned=aligned,
            crossing=len(crossing),
            home=_int32(home, device),
            slot=_int32(slot, device),
            residual=_int32(
                np.pad(residual, (0, residual_rows - len(residual)), constant_values=-1), device
            ),
            by_column=Segments.of(entry_slot, number, whole.place[summed], len(columns), device),
            by_row=Segments.of(
                number, entry_slot, whole.place[summed], residual_rows, device, in_order=True
            ),
            direct_pairs=int(direct.sum()),
            scratch_width=_scratch_width(whole, crosses),
        )


class _Entries(NamedTuple):
    """Every positive entry of the whole projection, by row and column."""

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    place: NDArray[np.int64]
    """Index among all entries of its rank, those of weight 0 included."""

    student_rank: NDArray[np.int64]
    teacher_rank: NDArray[np.int64]
    direct: NDArray[np.bool_]
    column_count: int
    aligned: list[int | None]
    """``ColumnPlan.aligned`` of every rank."""

    @classmethod
    def of(
        cls,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32],
        values: NDArray[np.float32],
        student_shard: VocabShard,
        teacher_shard: VocabShard,
    ) -> _Entries:
        row = np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))
        column = indices.astype(np.int64)
        order = np.lexsort((column, row))
        student_rank = row[order] // student_shard.width
        place = np.arange(len(order)) - np.searchsorted(student_rank, student_rank)
        is_positive = values[order] > 0
        row, column, value, place = (
            row[order][is_positive],
            column[order][is_positive],
            values[order][is_positive],
            place[is_positive],
        )
        columns = teacher_shard.vocab_size
        alone = (np.bincount(row)[row] == 1) & (np.bincount(column, minlength=columns)[column] == 1)
        ranks = row // student_shard.width, column // teacher_shard.width
        direct = alone & (value == 1) & (ranks[0] == ranks[1])
        aligned: list[int | None] = []
        for rank in range(
            1 + max(ranks[0].max(initial=0), student_shard.start // student_shard.width)
        ):
            here = ranks[0] == rank
            count = _aligned_pairs(
                row[here] - rank * student_shard.width,
                column[here] - rank * teacher_shard.width,
                direct[here],
                pair_block(student_shard.width),
            )
            aligned.append(count)
            if count is not None:
                direct &= ~here | (row < rank * student_shard.width + count)
        return cls(row, column, place, *ranks, direct, columns, aligned)


def _aligned_pairs(
    row: NDArray[np.int64], column: NDArray[np.int64], direct: NDArray[np.bool_], block: int
) -> int | None:
    """``ColumnPlan.aligned`` of a rank, from its entries in local columns, ascending by row."""
    pairs = np.arange(int(direct.sum()))
    kept = len(pairs) // block * block
    residual = np.unique(row[row >= kept])
    is_aligned = (
        kept > 0
        and np.array_equal(row[direct], pairs)
        and np.array_equal(column[direct], pairs)
        and np.array_equal(residual, kept + np.arange(len(residual)))
    )
    return kept if is_aligned else None


def _has_unit_rows(indptr: NDArray[np.int64], values: NDArray[np.float32]) -> bool:
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    sums = np.bincount(row, values, minlength=len(indptr) - 1)
    empty = np.diff(indptr) == 0
    return bool((empty | (np.abs(sums - 1) <= _UNIT_SLACK)).all())


def _scratch_width(whole: _Entries, crosses: NDArray[np.bool_]) -> int:
    """Largest number of summed columns and residual rows of any rank."""
    summed = ~whole.direct
    inside = summed & ~crosses[whole.column]
    columns = _distinct_by_rank(whole.teacher_rank[inside], whole.column[inside])
    rows = _distinct_by_rank(whole.student_rank[summed], whole.row[summed])
    width = max(len(columns), len(rows))
    totals = np.pad(columns, (0, width - len(columns))) + np.pad(rows, (0, width - len(rows)))
    return int(crosses.sum()) + int(totals.max(initial=0))


def _distinct_by_rank(rank: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    _, first = np.unique(ids, return_index=True)
    return np.bincount(rank[first])


def _int32(array: NDArray[np.int64], device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)

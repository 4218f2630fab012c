"""Softmax statistics of rows whose columns are split into members and others.

T rows, Vp local columns, R rows of chains, C rows of singles, W words of 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from megatron_ext.distributed.vocab_parallel import (
    VocabShard,
    accumulation_dtype,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ExpSums
from megatron_ext.ops.launch import (
    LANE_CONFIGS,
    Implementation,
    LaunchConfig,
    chosen_config,
    small_block,
)
from megatron_ext.ops.partition_kl.chain_masses import ChosenColumns
from megatron_ext.ops.partition_kl.shared_columns import ColumnSet


class RowGroup(NamedTuple):
    """Rows that share a way of finding their members."""

    rows: torch.Tensor
    """int64 [n]"""

    members: Callable[[slice], torch.Tensor]
    """Function to the member mask, bool [n' or 1, Vp], of a slice of the rows."""

    def slices(self, width: int) -> Iterator[slice]:
        return row_slices(len(self.rows), width, device=self.rows.device)


class RowSplit(NamedTuple):
    """Members of each row: shared tokens, chosen columns or none."""

    single_row: torch.Tensor
    """int64 [C]: rows whose members are the shared tokens."""

    shared: ColumnSet

    chosen: ChosenColumns
    """Members of the rows of chains."""

    of_row: torch.Tensor
    """int32 [T]: 0 for a row of a single, r + 1 for the r-th of chains; of the others -1 for a row
    that is read, which has no members, and -2 for one that is not."""

    has_others: bool
    """Whether any row may be at -1; on the host."""

    kernel_bits: torch.Tensor | None = None
    """``bits`` where a kernel made them."""

    @classmethod
    def of(
        cls,
        rows: int,
        single_row: torch.Tensor,
        shared: ColumnSet,
        chosen: ChosenColumns,
        read: torch.Tensor | bool,
    ) -> RowSplit:
        """Split some rows; ``read`` [T] are those to read of no chunk: True all, False none."""
        if isinstance(read, bool):
            of_row = torch.full((rows,), read - 2, dtype=torch.int32, device=single_row.device)
        else:
            of_row = read.int() - 2
        number = torch.arange(1, len(chosen.row) + 1, dtype=torch.int32, device=of_row.device)
        of_row.index_fill_(0, single_row, 0).index_copy_(0, chosen.row, number)
        return cls(single_row, shared, chosen, of_row, read is not False)

    def singles(self) -> RowGroup:
        return RowGroup(self.single_row, lambda part: self.shared.mask[None])

    def chains(self) -> RowGroup:
        width = len(self.shared.mask)
        return RowGroup(self.chosen.row, lambda part: self.chosen.mask(part, width))

    def unused(self) -> RowGroup:
        """Rows of neither singles nor chains; waits for the device."""
        return self._without_members(self.of_row < 0)

    def others(self) -> RowGroup:
        """Those of ``unused`` that are read; waits for the device."""
        return self._without_members(self.of_row == -1)

    def _without_members(self, rows: torch.Tensor) -> RowGroup:
        none = torch.zeros_like(self.shared.mask)[None]
        return RowGroup(torch.nonzero(rows)[:, 0], lambda part: none)

    def bits(self) -> torch.Tensor:
        """Member masks, int32 [1 + R, W]: column v is bit v % 32 of word v // 32.

        Row 0 holds the shared tokens, the other rows are those of chains.
        """
        if self.kernel_bits is not None:
            return self.kernel_bits
        rows, words = len(self.chosen.row), len(self.shared.words)
        bits = member_bits(self.chosen.place, self.chosen.local, rows, words)
        bits[0] = self.shared.words
        return bits


def member_bits(place: torch.Tensor, column: torch.Tensor, rows: int, words: int) -> torch.Tensor:
    """Bits int32 [1 + R, W] of columns: row r + 1 holds those whose place is r, row 0 none.

    Args:
        place: int64 [N]
        column: int64 [N], each once in a row; negative for none.
    """
    bits = torch.zeros(1 + rows, words, dtype=torch.int32, device=column.device)
    one = torch.ones_like(column, dtype=torch.int32).bitwise_left_shift_((column % 32).int())
    # The sum sets bits, since no column comes twice.
    word = (place + 1) * words + column.clamp(min=0) // 32
    bits.view(-1).index_add_(0, word, one.masked_fill_(column < 0, 0))
    return bits


class SplitStatistics(NamedTuple):
    """Statistics of this rank's real columns, not merged over shards."""

    members: ExpSums
    """[T] at the temperature."""

    others: ExpSums
    """[T] at temperature 1."""

    unscaled: ExpSums
    """[T] members at temperature 1."""

    column: torch.Tensor
    """int64 [T]: this rank's column of the largest member, the first of equals."""

    is_masked: torch.Tensor
    """bool [T]: rows with a member at -inf."""

    top_column: torch.Tensor | None = None
    """int64 [T]: this rank's column of the largest logit, the first of equals; None where it is not
    asked for."""

    @classmethod
    def of(
        cls,
        sums: torch.Tensor,
        has_unscaled: bool,
        column: torch.Tensor,
        is_masked: torch.Tensor,
        top_column: torch.Tensor | None,
    ) -> SplitStatistics:
        """Of ``sums`` [3, 2, T], whose last are written where another temperature asks for them."""
        members, others, unscaled = (ExpSums(*part) for part in sums)
        unscaled = unscaled if has_unscaled else members
        return cls(members, others, unscaled, column, is_masked, top_column)

    def largest(self) -> ExpSums:
        """The largest logit [T] of a row over its columns of this rank, and a sum that is 0 where
        there is none; of rows whose members' sums are known at temperature 1."""
        first, second = (
            part.peak.masked_fill(part.total == 0, -torch.inf)
            for part in (self.unscaled, self.others)
        )
        return ExpSums(torch.maximum(first, second), self.unscaled.total + self.others.total)


def split_statistics(
    logits: torch.Tensor,
    split: RowSplit,
    shard: VocabShard,
    *,
    temperature: float,
    for_labels: bool,
    by: Implementation,
) -> SplitStatistics:
    """Peaks and sums of each row's members and others, from one read. No graph, no collectives.

    The sums of a row that is not read are 0, those of one with NaN or +inf are NaN.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns. Padding is ignored.
        temperature: Temperature of the members; the others are at 1.
        for_labels: Whether what cross-entropy takes is asked for: members' sums at temperature 1,
            and the largest columns.
        by: What computes them, not ``auto``.
    """
    if by == "triton":
        return _by_kernel(logits.detach(), split, shard, temperature, for_labels)
    run = _by_loops if by == "cpu" and shard.valid_width else _by_torch
    return run(logits.detach(), split, shard, temperature, for_labels)


def _by_loops(
    logits: torch.Tensor,
    split: RowSplit,
    shard: VocabShard,
    temperature: float,
    for_labels: bool,
) -> SplitStatistics:
    from megatron_ext.ops.partition_kl import compiled_loops as loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    rows = len(logits)
    sums = torch.zeros(3, 2, rows, dtype=torch.float32)
    column = torch.zeros(rows, dtype=torch.int64)
    is_masked = torch.zeros(rows, dtype=torch.bool)
    top_column = torch.zeros(rows if for_labels else 0, dtype=torch.int64)
    arguments = (
        flat_rows(logits, shard.valid_width, temperature),
        flat_rows(logits, shard.valid_width),
        loops.Split(
            split.of_row.numpy(),
            split.shared.mask.numpy(),
            np.array(split.chosen.pointers, dtype=np.int64),
            split.chosen.local.numpy(),
        ),
        sums.numpy(),
        column.numpy(),
        is_masked.numpy(),
        top_column.numpy(),
    )
    in_threads(lambda a, b: loops.split_statistics(a, b, *arguments), rows)
    top = top_column if for_labels else None
    return SplitStatistics.of(sums, temperature != 1.0, column, is_masked, top)


def _by_torch(
    logits: torch.Tensor,
    split: RowSplit,
    shard: VocabShard,
    temperature: float,
    for_labels: bool,
) -> SplitStatistics:
    rows, has_unscaled = len(logits), temperature != 1.0 and for_labels
    dtype = accumulation_dtype(logits.dtype)
    sums = torch.zeros(3, 2, rows, dtype=dtype, device=logits.device)
    column = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    is_masked = torch.zeros(rows, dtype=torch.bool, device=logits.device)
    top_column = torch.zeros_like(column) if for_labels else None
    padding = torch.arange(shard.width, device=logits.device) >= shard.valid_width
    groups = [split.singles(), split.chains(), *([split.others()] if split.has_others else [])]
    for group in groups:
        for part in group.slices(shard.width):
            row = group.rows[part]
            logits_of_rows, members = logits[row], group.members(part)
            inside = scaled_logits(logits_of_rows, temperature, ~members | padding)
            column[row] = inside.argmax(dim=-1)
            is_masked[row] = ((logits_of_rows == -torch.inf) & members & ~padding).any(dim=-1)
            _store(sums[0], row, inside)
            _store(sums[1], row, scaled_logits(logits_of_rows, 1.0, members | padding))
            if has_unscaled:
                _store(sums[2], row, scaled_logits(logits_of_rows, 1.0, ~members | padding))
            if top_column is not None:
                top_column[row] = logits_of_rows.masked_fill(padding, -torch.inf).argmax(dim=-1)
    return SplitStatistics.of(sums, has_unscaled, column, is_masked, top_column)


def _store(part: torch.Tensor, rows: torch.Tensor, scaled: torch.Tensor) -> None:
    top = scaled.amax(dim=-1)
    top.masked_fill_(top == -torch.inf, 0.0)
    part[0, rows] = top
    part[1, rows] = scaled.sub_(top[:, None]).exp_().sum(dim=-1)


def _by_kernel(
    logits: torch.Tensor,
    split: RowSplit,
    shard: VocabShard,
    temperature: float,
    for_labels: bool,
) -> SplitStatistics:
    return statistics_of_sets(
        logits,
        split.of_row,
        split.bits(),
        shard,
        ends=(split.shared.leading, split.shared.end),
        temperature=temperature,
        for_labels=for_labels,
    )


def statistics_of_sets(
    logits: torch.Tensor,
    of_row: torch.Tensor,
    bits: torch.Tensor,
    shard: VocabShard,
    *,
    ends: tuple[int, int] = (0, 0),
    temperature: float = 1.0,
    for_labels: bool = False,
) -> SplitStatistics:
    """``split_statistics`` of rows whose members are bits, by kernel in one launch.

    Args:
        of_row: int32 [T]: row of ``bits`` with a row's members; -1 for a row without members, -2
            for one that is not read.
        bits: int32 [1 + R, W]: column v is bit v % 32 of word v // 32.
        ends: Of row 0 of ``bits``, the columns before the first that is not a member, and up to the
            last that is.
    """
    from megatron_ext.ops.partition_kl.triton_kernels import split_statistics_kernel

    rows, width = len(logits), shard.valid_width
    sums = torch.empty(3, 2, rows, dtype=torch.float32, device=logits.device)
    column = torch.empty(rows, dtype=torch.int64, device=logits.device)
    is_masked = torch.empty(rows, dtype=torch.bool, device=logits.device)
    top_column = torch.empty_like(column) if for_labels else None
    has_unscaled = temperature != 1.0 and for_labels

    def launch(config: LaunchConfig) -> None:
        split_statistics_kernel[(rows,)](
            logits,
            of_row,
            bits,
            sums,
            column,
            is_masked,
            top_column,
            logits.stride(0),
            width,
            logits.shape[1],
            rows,
            bits.shape[1],
            *ends,
            temperature,
            HAS_TEMPERATURE=temperature != 1.0,
            HAS_UNSCALED=has_unscaled,
            BLOCK=small_block(width, config.block),
            num_warps=config.num_warps,
        )

    if rows:
        key = ("split_statistics", logits.dtype, width, temperature != 1.0, for_labels)
        launch(chosen_config(key, LANE_CONFIGS, launch))
    return SplitStatistics.of(sums, has_unscaled, column, is_masked, top_column)

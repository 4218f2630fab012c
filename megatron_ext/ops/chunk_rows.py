"""Rows of chunks as lists that a kernel can read, and their sums merged over vocabulary shards.

T rows, Vp local columns, C chunks. A row's sum of exponentials is a peak and a sum of
``exp(logit - peak)`` over some columns. The logit of a single column is such a sum as well: 1 on
the rank that has the column and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_min
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    merge_log_sum_exp,
)


def chunk_slots(chunk_id: torch.Tensor, chunk_count: int) -> torch.Tensor:
    """Chunk of each row, int64 [T], C for rows of no chunk, whose ids are negative."""
    return torch.where(chunk_id >= 0, chunk_id, chunk_count).to(torch.int64)


class ChunkRows(NamedTuple):
    """Rows of chunk c: ``order[offsets[c]:offsets[c + 1]]``, ascending. Made without waiting."""

    order: torch.Tensor
    """int32 [T]: rows sorted by chunk, those of no chunk last."""

    offsets: torch.Tensor
    """int32 [C + 1]."""

    chunk_id: torch.Tensor
    """int64 [T]: chunk of each row, negative for none."""

    @classmethod
    def of(cls, chunk_id: torch.Tensor, chunk_count: int) -> ChunkRows:
        """Build from chunk ids int64 [T], negative for rows of no chunk."""
        slots = chunk_slots(chunk_id, chunk_count)
        # A GPU sorts 4 bytes in half the passes of 8.
        order = torch.argsort(slots.int(), stable=True).int()
        sizes = torch.zeros(chunk_count + 1, dtype=torch.int32, device=chunk_id.device)
        sizes.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
        offsets = torch.zeros_like(sizes)
        offsets[1:] = sizes[:-1].cumsum(0)
        return cls(order, offsets, chunk_id)

    @property
    def slots(self) -> torch.Tensor:
        """Chunk of each row, int64 [T], C for none."""
        return chunk_slots(self.chunk_id, self.chunk_count)

    @property
    def chunk_count(self) -> int:
        """C"""
        return len(self.offsets) - 1

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums [C] of ``values`` [T] over the rows of each chunk, 0 where there is none."""
        # Adds in the order of rows; index_add_ on a GPU would add in a new order each time.
        return torch.segment_reduce(
            values[self.order.long()], "sum", offsets=self.offsets.long(), initial=0, unsafe=True
        )

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Means [C] of ``values`` [T] over the rows of each chunk, 0 where there is none."""
        return self.sums(values) / self.sizes().clamp(min=1)

    def sizes(self) -> torch.Tensor:
        """Number of rows of each chunk, int32 [C]."""
        return self.offsets.diff()


class ChunkedLogits(NamedTuple):
    """One model's logits, the rows of each chunk, and the shard of the columns."""

    logits: torch.Tensor
    """[T, Vp], any float dtype; rows may be strided."""

    rows: ChunkRows
    shard: VocabShard

    @classmethod
    def of(
        cls, logits: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int, shard: VocabShard
    ) -> ChunkedLogits:
        """Build from the chunk of each row, int64 [T], negative for none."""
        return cls(logits, ChunkRows.of(chunk_id, chunk_count), shard)


def index_sum(values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """``zeros(count).index_add(0, index, values)`` [G], with a graph.

    On a GPU ``index_add`` adds in the order in which threads arrive, which differs between ranks
    and runs; ``index_put`` sorts the indices first. For vectors: the sort costs more than the sum.

    Args:
        values: [N]
        index: int64 [N], below ``count``.
    """
    return values.new_zeros(count).index_put((index,), values, accumulate=True)


class ExpSums(NamedTuple):
    """Sums of exponentials over this rank's columns, one dtype, [T] each."""

    peak: torch.Tensor
    """0 where there is no column."""

    total: torch.Tensor


def merge_exp_sums(sums: Sequence[ExpSums], shard: VocabShard) -> list[LogSumExp]:
    """Merge each of the sums over all shards, in the first one's dtype. Two all-reduces.

    The sums may have different numbers of rows.
    """
    dtype = sums[0].peak.dtype
    peak, total = (torch.cat(parts).to(dtype) for parts in zip(*sums, strict=True))
    lengths = [len(part.peak) for part in sums]
    merged = merge_log_sum_exp(peak, total, shard.group)
    split = (part.split(lengths) for part in merged)
    return [LogSumExp(*parts) for parts in zip(*split, strict=True)]


def local_column(token_id: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """This rank's column of each row's token, int64 [T], -1 where another rank has it."""
    column = token_id - shard.start
    return column.masked_fill((column < 0) | (column >= shard.valid_width), -1)


def token_exp_sums(logits: torch.Tensor, column: torch.Tensor, temperature: float = 1.0) -> ExpSums:
    """Sums of one column each: ``logits / temperature`` at ``column`` int64 [T]; -1: no column
    here."""
    here = column >= 0
    picked = logits.detach().gather(-1, column.clamp(min=0)[:, None])[:, 0]
    picked = picked.to(accumulation_dtype(logits.dtype)) / temperature
    return ExpSums(torch.where(here, picked, 0.0), here.to(picked.dtype))


def token_log_probs(
    token: LogSumExp, whole: LogSumExp, token_id: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """Log-probabilities [T] from merged sums: NaN beyond the vocabulary, 0 for a negative id."""
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    log_prob = (token.peak - whole.peak).add_(token.log_sum).sub_(whole.log_sum)
    log_prob.masked_fill_(token_id >= shard.vocab_size, torch.nan)
    return log_prob.masked_fill_(token_id < 0, 0.0)


def merge_top_columns(
    columns: Sequence[torch.Tensor],
    local: Sequence[ExpSums],
    merged: Sequence[LogSumExp],
    shards: Sequence[VocabShard],
) -> list[torch.Tensor]:
    """Global columns int64 [T] of the largest logits, the first of equals. One all-reduce.

    Args:
        columns: This rank's columns of each model's largest logits, local.
        local: Sums over all columns of this rank.
        merged: Sums over all shards.
    """
    if shards[0].group is None:
        return list(columns)
    candidates = []
    for column, part, whole, shard in zip(columns, local, merged, shards, strict=True):
        beaten = (part.peak != whole.peak) | (part.total == 0)
        global_column = column + shard.start
        candidates.append(global_column.masked_fill(beaten, torch.iinfo(torch.int64).max))
    first = all_reduce_min(torch.cat(candidates), shards[0].group)
    return list(first.split([len(column) for column in columns]))

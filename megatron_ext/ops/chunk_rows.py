"""Rows of chunks as lists that a kernel can walk, and the logits in them.

T rows, Vp local columns, C chunks.

Sums of exponentials that vocabulary shards merge in one exchange. T rows, Vp local columns.

They are a peak and a sum of ``exp(logit - peak)`` for each row, over whatever columns. The logit of
a single column is such a sum as well, which is 1 on the rank that has it and 0 elsewhere.
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
    """int64 [T]: the chunk of each row, C for rows of no chunk, whose ids are negative."""
    return torch.where(chunk_id >= 0, chunk_id, chunk_count).to(torch.int64)


class ChunkRows(NamedTuple):
    """Rows of chunk c: ``order[offsets[c]:offsets[c + 1]]``, ascending. Made without a sync."""

    order: torch.Tensor
    """int32 [T]: rows sorted by chunk, those of no chunk last."""

    offsets: torch.Tensor
    """int32 [C + 1]."""

    slots: torch.Tensor
    """int64 [T]: each row's chunk, C for none."""

    @classmethod
    def of(cls, chunk_id: torch.Tensor, chunk_count: int) -> ChunkRows:
        """From int64 [T], negative for rows of no chunk."""
        slots = chunk_slots(chunk_id, chunk_count)
        order = torch.argsort(slots, stable=True).int()
        sizes = torch.zeros(chunk_count + 1, dtype=torch.int32, device=chunk_id.device)
        sizes.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
        offsets = torch.zeros_like(sizes)
        offsets[1:] = sizes[:-1].cumsum(0)
        return cls(order, offsets, slots)

    @property
    def chunk_count(self) -> int:
        """C"""
        return len(self.offsets) - 1

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums [C] of ``values`` [T] over the rows of each chunk, 0 where there is none."""
        # In the order of rows: index_add_ on a GPU would add in another order each time.
        return torch.segment_reduce(
            values[self.order.long()], "sum", offsets=self.offsets.long(), initial=0, unsafe=True
        )

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Means [C] of ``values`` [T] over the rows of each chunk, 0 where there is none."""
        return self.sums(values) / self.sizes().clamp(min=1)

    def sizes(self) -> torch.Tensor:
        """int32 [C]: rows of each chunk."""
        return self.offsets.diff()


class ChunkedLogits(NamedTuple):
    """One model's logits, the rows of each chunk, and which columns these are."""

    logits: torch.Tensor
    """[T, Vp], any float dtype; rows may be strided."""

    rows: ChunkRows
    shard: VocabShard

    @classmethod
    def of(
        cls, logits: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int, shard: VocabShard
    ) -> ChunkedLogits:
        """From the chunk of each row, int64 [T], negative for none."""
        return cls(logits, ChunkRows.of(chunk_id, chunk_count), shard)


def index_sum(values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """``zeros(count).index_add(0, index, values)`` [G], with a graph.

    On a GPU ``index_add`` adds in the order in which threads come, another one on every rank and in
    every run; ``index_put`` sorts the indices first. For vectors: the sort costs more than the sum.

    Args:
        values: [N]
        index: int64 [N], below ``count``.
    """
    return values.new_zeros(count).index_put((index,), values, accumulate=True)


class ExpSums(NamedTuple):
    """Of this rank's columns, one dtype, [T] each."""

    peak: torch.Tensor
    """0 where there is no column."""

    total: torch.Tensor


def merge_exp_sums(sums: Sequence[ExpSums], shard: VocabShard) -> list[LogSumExp]:
    """Each of the sums over all shards, in the first one's dtype. Two all-reduces.

    Lanes may have different numbers of rows.
    """
    dtype = sums[0].peak.dtype
    peak, total = (torch.cat(parts).to(dtype) for parts in zip(*sums, strict=True))
    lengths = [len(part.peak) for part in sums]
    merged = merge_log_sum_exp(peak, total, shard.group)
    split = (part.split(lengths) for part in merged)
    return [LogSumExp(*parts) for parts in zip(*split, strict=True)]


def local_column(token_id: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """int64 [T]: this rank's column of each row's token, -1 where it is not here."""
    column = token_id - shard.start
    here = (token_id >= 0) & (column >= 0) & (column < shard.valid_width)
    return torch.where(here, column, -1)


def token_exp_sums(logits: torch.Tensor, column: torch.Tensor, temperature: float = 1.0) -> ExpSums:
    """The logits, over the temperature, at ``column`` int64 [T]; -1: not on this rank."""
    here = column >= 0
    picked = logits.detach().gather(-1, column.clamp(min=0)[:, None])[:, 0]
    picked = picked.to(accumulation_dtype(logits.dtype)) / temperature
    return ExpSums(torch.where(here, picked, 0.0), here.to(picked.dtype))


def token_log_probs(
    token: LogSumExp, whole: LogSumExp, token_id: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """[T] of merged sums: NaN beyond the vocabulary, 0 for a negative ``token_id``."""
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
        local: Lanes over all its columns.
        merged: The same over all shards.
    """
    found = []
    for column, part, whole, shard in zip(columns, local, merged, shards, strict=True):
        own = column + shard.start
        if shard.group is not None:
            beaten = (part.peak != whole.peak) | (part.total == 0)
            own = own.masked_fill(beaten, torch.iinfo(torch.int64).max)
        found.append(own)
    first = all_reduce_min(torch.cat(found), shards[0].group)
    return list(first.split([len(column) for column in columns]))

"""Rows of chunks as lists that a kernel can walk, and the logits in them.

T rows, Vp local columns, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard


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

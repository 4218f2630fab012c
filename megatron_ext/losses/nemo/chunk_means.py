"""Differentiable means over the rows of each chunk. T rows, K columns, C chunks."""

from __future__ import annotations

import torch

from megatron_ext.ops.chunk_reduce import chunk_sizes, chunk_slots


def chunk_means(values: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int) -> torch.Tensor:
    """Mean [C, K] of ``values`` [T, K] over the rows of each chunk, by autograd; ids as usual."""
    slots = chunk_slots(chunk_id, chunk_count)
    sizes = chunk_sizes(slots, chunk_count, values.dtype)
    sums = values.new_zeros(chunk_count + 1, values.shape[-1]).index_add(0, slots, values)
    return (sums / sizes[:, None])[:-1]

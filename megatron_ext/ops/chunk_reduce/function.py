"""Means over the rows of each chunk, linear in T. T rows, Vp local columns, C chunks.

Rows of no chunk are added to a slot of their own, C, that is cut off at the end: nothing depends on
how many there are, so the host never waits for the device, and a NaN in them stays there.
"""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    accumulation_dtype,
    row_slices,
    scaled_logits,
)


def chunk_slots(chunk_id: torch.Tensor, chunk_count: int) -> torch.Tensor:
    """int64 [T]: the chunk of each row, C for rows of no chunk (negative ids)."""
    return torch.where(chunk_id >= 0, chunk_id, chunk_count).to(torch.int64)


def chunk_sizes(slots: torch.Tensor, chunk_count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows in each of the C + 1 slots, at least 1 so that it can divide."""
    sizes = torch.zeros(chunk_count + 1, dtype=dtype, device=slots.device)
    sizes.index_add_(0, slots, torch.ones_like(slots, dtype=dtype))
    return sizes.clamp_(min=1)


def chunk_mean_softmax(
    logits: torch.Tensor,
    lse: LogSumExp,
    slots: torch.Tensor,
    sizes: torch.Tensor,
    *,
    temperature: float = 1.0,
    excluded: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean of ``exp(logits / temperature - lse)`` over the rows of each chunk, without a graph.

    Args:
        logits: [T, Vp], any float dtype; a few rows at a time are turned into probabilities.
        lse: of [T], over every shard, at the same temperature.
        slots: int64 [T] from ``chunk_slots``.
        sizes: [C + 1] from ``chunk_sizes``.
        excluded: bool [Vp], columns that get zero.

    Returns:
        [C, Vp] fp32 (fp64 for fp64 logits). No collectives.
    """
    sums = torch.zeros(
        sizes.shape[0],
        logits.shape[-1],
        dtype=accumulation_dtype(logits.dtype),
        device=logits.device,
    )
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        sums.index_add_(0, slots[rows], lse.normalise_(scaled, rows).exp_())
    return sums.div_(sizes[:, None])[:-1]

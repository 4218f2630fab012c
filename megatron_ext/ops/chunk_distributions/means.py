"""Mean distributions of a few chunks. C chunks, C' of them, Vp local columns."""

from __future__ import annotations

from typing import Final

import torch

from megatron_ext.ops.chunk_distributions.model_rows import ModelRows, rows_of

_BLOCK: Final = 4096


def chunk_means(model: ModelRows, ends: list[int], chunks: slice) -> torch.Tensor:
    """Mean of ``softmax(logits / temperature)`` over the rows of each chunk (README, 2).

    Returns:
        [C', Vp] fp32 (fp64 for fp64 logits); 0 in padding and for chunks without rows. No
        collectives.
    """
    count, dtype = chunks.stop - chunks.start, model.lse.peak.dtype
    sums = torch.zeros(count, model.shard.width, dtype=dtype, device=model.logits.device)
    for row in rows_of(model, ends, chunks):
        sums.index_add_(0, model.rows.slots[row] - chunks.start, model.probabilities(row))
    return sums.div_(model.rows.sizes()[chunks].clamp(min=1)[:, None])


def chunk_means_by_kernel(model: ModelRows, chunks: slice) -> torch.Tensor:
    """``chunk_means`` by a Triton kernel; the host waits for nothing."""
    from megatron_ext.ops.chunk_distributions.triton_kernels import chunk_means_kernel

    count, width = chunks.stop - chunks.start, model.shard.width
    out = torch.empty(count, width, dtype=torch.float32, device=model.logits.device)
    if count and width:
        chunk_means_kernel[(count, -(-width // _BLOCK))](
            model.logits,
            model.rows.order,
            model.rows.offsets,
            *model.lse,
            out,
            chunks.start,
            model.logits.stride(0),
            width,
            model.shard.valid_width,
            model.temperature,
            HAS_TEMPERATURE=model.temperature != 1.0,
            BLOCK=_BLOCK,
        )
    return out

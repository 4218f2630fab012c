"""From a slope of chunk distributions to the gradient of the logits. C chunks, C' of them."""

from __future__ import annotations

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.ops.chunk_distributions.model_rows import ModelRows, rows_of
from megatron_ext.ops.unit_gradient import scale_rows_


def row_scale(model: ModelRows, grad_scale: torch.Tensor | None) -> torch.Tensor:
    """``grad_scale_c / (|S_c| tau)`` [C]: what README 3 has before the parentheses."""
    sizes = model.rows.sizes().clamp(min=1).to(model.lse.peak.dtype)
    return (1.0 if grad_scale is None else grad_scale) / (sizes * model.temperature)


def write_row_gradients(
    model: ModelRows,
    ends: list[int],
    chunks: slice,
    slope: torch.Tensor,
    scale: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Write README 3 into the rows of these chunks.

    Args:
        slope: [C', Vp], dL/dQ of the chunks.
        scale: [C] from ``row_scale``; rows of a chunk at 0 get exactly 0.
        gradient: [T, Vp], may be the logits.

    One all-reduce of [T'] a slice of T' rows.
    """
    for row in rows_of(model, ends, chunks):
        slot = model.rows.slots[row]
        probs, factor = model.probabilities(row), scale[slot, None]
        own = slope[slot - chunks.start]
        centre = all_reduce_sum((probs * own).sum(dim=-1, keepdim=True), model.shard.group)
        out = probs.mul_(own.sub_(centre)).mul_(factor).masked_fill_(factor == 0, 0.0)
        gradient[row] = out.to(gradient.dtype)


def clear_rows_of_no_chunk_(gradient: torch.Tensor, model: ModelRows, *, by_kernel: bool) -> None:
    """Make these rows exactly 0, whatever they hold."""
    used = (model.rows.slots < model.rows.chunk_count).to(model.lse.peak.dtype)
    scale_rows_(gradient, used, "triton" if by_kernel else "torch")

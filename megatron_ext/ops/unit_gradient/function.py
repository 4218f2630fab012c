"""The last step of a backward whose gradient the forward wrote. T rows, Vp local columns."""

from __future__ import annotations

from typing import Final

import torch

from megatron_ext.distributed.vocab_parallel import row_slices
from megatron_ext.ops.implementation import Implementation, uses_triton

_BLOCK: Final = 8192


def scale_rows_(
    gradient: torch.Tensor, scale: torch.Tensor, implementation: Implementation = "auto"
) -> torch.Tensor:
    """``gradient`` [T, Vp] times ``scale`` [T], in place and rounded once. No collectives.

    By kernel, a row at 1 is neither read nor written, so that a forward which was told its weights
    pays for nothing here. A row at 0 becomes 0 whatever it holds, NaN included.
    """
    rows, width = gradient.shape
    if uses_triton(implementation, gradient):
        from megatron_ext.ops.unit_gradient.triton_kernels import scale_rows_kernel

        if rows and width:
            grid = (rows, -(-width // _BLOCK))
            factors = scale.float().contiguous()
            scale_rows_kernel[grid](gradient, factors, gradient.stride(0), width, BLOCK=_BLOCK)
        return gradient
    for part in row_slices(rows, width, device=gradient.device):
        factors = scale[part, None]
        # Only the host knows without waiting whether there is anything to do.
        if factors.device.type == "cpu" and bool((factors == 1).all()):
            continue
        gradient[part] = (gradient[part] * factors).masked_fill_(factors == 0, 0.0)
    return gradient

"""Which sample each row of a microbatch is of. B batch, T tokens, S samples."""

from __future__ import annotations

import torch


def row_samples(positions: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """int64 [B * T]: the sample of each position.

    Args:
        positions: [B, T], of which only shape and device matter.
        cu_seqlens: [S + 1] where packed samples begin in the one row, and the end; None: a sample
            is a row.
    """
    rows = torch.arange(positions.numel(), device=positions.device)
    if cu_seqlens is None:
        return rows // max(positions.shape[1], 1)
    ends = cu_seqlens[1:].to(torch.int64)
    return torch.bucketize(rows, ends, right=True).clamp(max=len(ends) - 1)

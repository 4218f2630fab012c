"""Statistics of softmax rows straight from their definition. T rows, V columns."""

from __future__ import annotations

import torch


def row_statistics_reference(
    logits: torch.Tensor, *, temperature: float = 1.0, members: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exps [T] over all columns and over ``members`` bool [V], and the argmax [T]."""
    scaled = logits / temperature
    inside = scaled if members is None else scaled.masked_fill(~members, -torch.inf)
    return scaled.logsumexp(dim=-1), inside.logsumexp(dim=-1), scaled.argmax(dim=-1)

"""Divergences straight from their definition, over the last dimension."""

from __future__ import annotations

import torch


def divergence_reference(
    p: torch.Tensor, q: torch.Tensor, *, direction: str = "forward", mixture: float = 0.5
) -> torch.Tensor:
    """D(P || Q) [...] of probabilities [..., V]; differentiable by autograd."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.xlogy(a, a) - torch.xlogy(a, b)).sum(dim=-1)

    if direction == "forward":
        return kl(p, q)
    if direction == "reverse":
        return kl(q, p)
    mix = mixture * p + (1 - mixture) * q
    return mixture * kl(p, mix) + (1 - mixture) * kl(q, mix)

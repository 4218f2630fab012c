"""Terms of a divergence of probabilities, and its slope. Any shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.ops.divergence import DivergenceOptions, divergence_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedOptions(DivergenceOptions):
    """How chunk distributions are compared."""

    uncommon_weight: float = 0.0
    """w of the sorted L1 over the other columns."""

    top_u: int | None = None
    """Places of it that are compared; None: all, which is exact."""


def divergence_slope(
    p: torch.Tensor, q: torch.Tensor, options: DivergenceOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of the divergence of probabilities, and their derivatives by ``q``.

    The derivative is taken at a ``q`` of at least 1024 times the smallest normal number: what
    comes before it in the chain is below that too, so that it fades to zero instead of NaN.
    """
    value, slope = divergence_terms(p.log(), q.log(), options.direction, options.mixture)
    return value, slope / q.clamp(min=1024 * torch.finfo(q.dtype).tiny)

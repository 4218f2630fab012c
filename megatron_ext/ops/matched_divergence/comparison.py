"""Terms of a divergence of probabilities, and its slope. Any shape."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.ops.divergence import Divergence, divergence_terms


class Comparing(NamedTuple):
    """How chunk distributions are compared."""

    temperature: float = 1.0

    direction: Divergence = "forward"

    mixture: float = 0.5
    """Weight of the teacher in ``jensen_shannon``."""

    uncommon_weight: float = 0.0
    """w of the sorted L1 over the other columns."""

    top_u: int | None = None
    """Places of it that are compared; None: all, which is exact."""


def divergence_slope(
    p: torch.Tensor, q: torch.Tensor, comparing: Comparing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of the divergence of probabilities, and their derivatives by ``q``.

    The derivative is taken at a ``q`` of at least 1024 times the smallest normal number: what
    comes before it in the chain is below that too, so that it fades to zero instead of NaN.
    """
    value, slope = divergence_terms(p.log(), q.log(), comparing.direction, comparing.mixture)
    return value, slope / q.clamp(min=1024 * torch.finfo(q.dtype).tiny)

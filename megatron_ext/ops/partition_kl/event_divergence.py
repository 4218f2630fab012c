"""Divergence between two models' events, segment by segment. N events, G segments."""

from __future__ import annotations

from typing import Final

import torch

from megatron_ext.ops.divergence import DivergenceOptions, divergence_terms
from megatron_ext.ops.index_sum import index_sum
from megatron_ext.ops.unit_gradient import kept_gradient

IMPOSSIBLE: Final = -1e9
"""Log-mass of an event that cannot happen: finite, so that sums and gradients of it are."""


def segment_log_softmax(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """``values`` [N] minus the log-sum-exp of their segment; finite values, ids below ``count``."""
    peak = values.detach().new_full((count,), -torch.inf)
    peak = peak.scatter_reduce(0, segment, values.detach(), "amax")
    shifted = values - peak[segment]
    total = index_sum(shifted.exp(), segment, count)
    return shifted - total[segment].log()


def event_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    segment: torch.Tensor,
    count: int,
    options: DivergenceOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """D(P || Q) [G] of each segment's events at a temperature.

    Args:
        student: [N] log-masses; the only argument with a gradient. Those below half of
            ``IMPOSSIBLE`` are no event.
        teacher: [N]
        segment: int64 [N]

    Returns:
        D [G]; log Q and log P [N] at the temperature, without a graph, -inf for what is no event.
    """

    def evaluate(
        events: torch.Tensor, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_q, log_p = (
            segment_log_softmax(side / options.temperature, segment, count).masked_fill_(
                side < IMPOSSIBLE / 2, -torch.inf
            )
            for side in (events[:, 0], teacher.to(events.dtype))
        )
        terms = divergence_terms(log_p, log_q, options.direction, options.mixture)
        if gradient is not None:
            total = index_sum(terms.slope, segment, count)
            slope = (terms.slope - log_q.exp() * total[segment]).div_(options.temperature)
            gradient.copy_(slope[:, None])
        return index_sum(terms.value, segment, count), log_q, log_p

    divergence, log_q, log_p = kept_gradient(student[:, None], evaluate, slots=segment)
    return divergence, log_q, log_p


def segment_top(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Index into ``values`` [N] of the largest of each segment [G], the first on a tie."""
    peak = values.new_full((count,), -torch.inf).scatter_reduce(0, segment, values, "amax")
    index = torch.arange(len(values), device=values.device)
    index = index.masked_fill(values < peak[segment], len(values))
    first = torch.full((count,), len(values), dtype=torch.int64, device=values.device)
    return first.scatter_reduce(0, segment, index, "amin")

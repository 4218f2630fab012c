"""Divergence between two models' events, segment by segment. N events, G segments."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.ops.divergence import Divergence, divergence_terms
from megatron_ext.ops.index_sum import index_sum

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
    *,
    temperature: float = 1.0,
    direction: Divergence = "forward",
    mixture: float = 0.5,
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
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _EventDivergence.apply(
        student, teacher, segment, count, temperature, direction, mixture
    )
    return out


class _EventDivergence(torch.autograd.Function):
    """Keeps the derivative [N] alone. A segment whose gradient is 0 is not looked at."""

    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        segment: torch.Tensor,
        count: int,
        temperature: float,
        direction: Divergence,
        mixture: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_q, log_p = (
            segment_log_softmax(side / temperature, segment, count).masked_fill_(
                side < IMPOSSIBLE / 2, -torch.inf
            )
            for side in (student.detach(), teacher.to(student.dtype))
        )
        terms = divergence_terms(log_p, log_q, direction, mixture)
        total = index_sum(terms.slope, segment, count)
        grad = (terms.slope - log_q.exp() * total[segment]).div_(temperature)
        ctx.save_for_backward(grad, segment)
        ctx.mark_non_differentiable(log_q, log_p)
        return index_sum(terms.value, segment, count), log_q, log_p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_divergence: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        grad, segment = ctx.saved_tensors
        weight = grad_divergence[segment]
        grad = (weight * grad).masked_fill_(weight == 0, 0.0)
        return grad, None, None, None, None, None, None


def segment_top(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Index into ``values`` [N] of the largest of each segment [G], the first on a tie."""
    peak = values.new_full((count,), -torch.inf).scatter_reduce(0, segment, values, "amax")
    index = torch.arange(len(values), device=values.device)
    index = index.masked_fill(values < peak[segment], len(values))
    first = torch.full((count,), len(values), dtype=torch.int64, device=values.device)
    return first.scatter_reduce(0, segment, index, "amin")

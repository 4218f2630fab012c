"""Divergences of a student's distribution from its teacher's.

Any shape, one distribution a row; P is the teacher's distribution, Q the student's. Equations are
in the README.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import torch

from megatron_ext.errors import LossError
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.unit_gradient import kept_gradient

Divergence = Literal["forward", "reverse", "jensen_shannon"]
"""``forward``: KL(P || Q). ``reverse``: KL(Q || P). ``jensen_shannon``: of both to their
mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceOptions:
    """Options of the comparison of two distributions."""

    temperature: float = 1.0
    """tau of both models."""

    direction: Divergence = "forward"

    mixture: float = 0.5
    """Weight of the teacher in the mixture of ``jensen_shannon``."""


FORWARD_KL: Final = DivergenceOptions()


class DivergenceTerms(NamedTuple):
    """Terms of a divergence and of its derivative."""

    value: torch.Tensor
    """Sums to D over a row."""

    slope: torch.Tensor
    """dD/d log Q of each entry, with the entries independent of one another."""


def divergence_terms(
    log_p: torch.Tensor, log_q: torch.Tensor, direction: Divergence, mixture: float = 0.5
) -> DivergenceTerms:
    """Terms of D(P || Q) from log-probabilities, without a graph of their own.

    An entry at -inf has no mass. Where only one model has mass, the other's logarithm is that of
    the smallest normal number, -87 in fp32, a constant: the divergence stays finite, and a masked
    entry of the student has no slope.

    Args:
        log_p: fp32 or fp64.
        log_q: The same shape and dtype.
        mixture: Weight of P in the mixture that the Jensen-Shannon divergence compares with.
    """
    p, q = log_p.exp(), log_q.exp()
    floor = math.log(torch.finfo(log_p.dtype).tiny)
    masked = log_q == -torch.inf
    log_p = log_p.masked_fill(log_p == -torch.inf, floor)
    log_q = log_q.masked_fill(masked, floor)
    if direction == "forward":
        return DivergenceTerms(p * (log_p - log_q), (-p).masked_fill_(masked, 0.0))
    if direction == "reverse":
        value = q * (log_q - log_p)
        return DivergenceTerms(value, value + q)
    log_mix = torch.logaddexp(log_p + math.log(mixture), log_q + math.log1p(-mixture))
    slope = q * (log_q - log_mix) * (1 - mixture)
    return DivergenceTerms(mixture * p * (log_p - log_mix) + slope, slope)


def divergence(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    direction: Divergence,
    mixture: float = 0.5,
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """D(P || Q) [...] of log-probabilities [..., K], with a graph to ``log_q`` alone.

    Keeps one tensor [..., K] for backward. For K entries a row, not for a vocabulary.
    ``implementation`` is that of the gradient's scale.
    """

    def evaluate(rows: torch.Tensor, gradient: torch.Tensor | None) -> tuple[torch.Tensor]:
        value, slope = divergence_terms(
            torch.atleast_2d(log_p).flatten(0, -2), rows, direction, mixture
        )
        if gradient is not None:
            gradient.copy_(slope)
        return (value.sum(dim=-1),)

    values = kept_gradient(torch.atleast_2d(log_q), evaluate, implementation=implementation)
    out: torch.Tensor = values[0]
    return out.view(log_q.shape[:-1])


def divergence_slope(
    p: torch.Tensor, q: torch.Tensor, options: DivergenceOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of the divergence of probabilities, and their derivatives by ``q``.

    The derivative is taken at a ``q`` of at least 1024 times the smallest normal number. The factor
    before it in the chain is below that too, so the product fades to zero instead of NaN.
    """
    value, slope = divergence_terms(p.log(), q.log(), options.direction, options.mixture)
    return value, slope / q.clamp(min=1024 * torch.finfo(q.dtype).tiny)


class ProjectedTerms(NamedTuple):
    """Terms of a few chunks, column by column."""

    slope: torch.Tensor
    """[C, Vpt] dD_c/dQ_c of this rank's columns, with the columns independent of one another."""

    value: torch.Tensor
    """[C, Vpt] terms of D_c."""

    centre: torch.Tensor
    """[C, Vpt] terms of sum_t Q_c[t] slope[t]; arbitrary for ``forward``, where the sum is -1."""


def projected_terms(
    p: torch.Tensor,
    projected: torch.Tensor,
    mass: torch.Tensor,
    direction: Divergence,
    mixture: float,
) -> ProjectedTerms:
    """Terms of D(P || Q), Q = projected / mass (README of ``ops/projected_kl``, 5 and 7 to 9)."""
    floor = probability_floor(p)
    log_p = p.clamp(min=floor).log_()
    if direction == "forward":
        held = projected.clamp(min=floor)
        value = log_p.sub_(torch.log(held).sub_(mass.log())).mul_(p)
        return ProjectedTerms(torch.div(p, held).mul_(-mass), value, value)
    q = projected / mass
    log_q = projected.clamp(min=floor).log_().sub_(mass.log())
    if direction == "reverse":
        log_ratio = log_q.sub_(log_p)
        value = q * log_ratio
        return ProjectedTerms(log_ratio, value, value)
    log_mix = (mixture * p + (1 - mixture) * q).clamp_(min=floor).log_()
    slope = log_q.sub_(log_mix).mul_(1 - mixture)
    centre = q * slope
    return ProjectedTerms(slope, (p * log_p.sub_(log_mix)).mul_(mixture).add_(centre), centre)


def probability_floor(like: torch.Tensor) -> float:
    """Lower bound that probabilities are clamped to before a logarithm or a division.

    A column whose Q~ underflows (some 80 nats below the student's largest logit) costs
    ``p * -log(floor)`` instead of infinity. Its gradient is ``-p / floor`` times probabilities
    below the floor, so it fades to zero with Q~ instead of turning into NaN. 1024 times the
    smallest normal number keeps ``log(floor) / floor`` finite and clear of flushed denormals.
    """
    return 1024 * torch.finfo(like.dtype).tiny


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(x))`` for x <= 0, with a graph; x above 0 by rounding counts as 0: -inf.

    Two forms meet at -log 2, so that neither end cancels (Maechler 2012, the CRAN note "Accurately
    computing log(1 - exp(-|a|))"). The gradient is 0 where the result is -inf.
    """
    inside = x < 0
    near = inside & (x > -math.log(2.0))
    far = inside & ~near
    # Each form gets only arguments in its range: where() would pass on a NaN gradient.
    by_expm1 = torch.log(-torch.expm1(x.masked_fill(~near, -0.5)))
    by_log1p = torch.log1p(-torch.exp(x.masked_fill(~far, -1.0)))
    return torch.where(near, by_expm1, by_log1p).masked_fill(~inside, -torch.inf)


def check_divergence(
    objective: str, *, temperature: float, direction: Divergence, mixture: float
) -> None:
    """Check the options that objectives with a divergence share.

    Raises:
        LossError: The temperature is not positive and finite, the direction unknown, or the
            mixture not inside (0, 1).
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise LossError(
            f"the temperature of {objective} must be positive", got=temperature, expected="above 0"
        )
    if direction not in get_args(Divergence):
        raise LossError(
            f"unknown direction of {objective}",
            got=repr(direction),
            expected=f"one of {', '.join(get_args(Divergence))}",
        )
    if not 0 < mixture < 1:
        raise LossError(
            f"the mixture of {objective} must leave weight to both models",
            got=mixture,
            expected="above 0 and below 1",
            fix="take direction forward or reverse for a KL in one direction",
        )


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

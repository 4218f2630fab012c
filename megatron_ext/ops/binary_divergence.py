"""Differences of two models' likelihoods of one event.

``x`` and ``y`` are the logarithms of the teacher's P and the student's Q, each to the power
``1 / tau``. Equations are in the README. C events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, get_args

import torch

from megatron_ext.errors import LossError
from megatron_ext.ops.divergence import log1mexp
from megatron_ext.ops.launch import Implementation, small_block, uses_triton
from megatron_ext.ops.unit_gradient import with_slope

Difference = Literal[
    "binary_kl",
    "binary_ce",
    "reverse_binary_kl",
    "binary_kl_temp_limit",
    "abs",
    "abs_exp",
    "renyi",
    "joschu_k2",
    "joschu_k3",
]

_BLOCK: Final = 128
"""Events of a program."""

_KINKED: Final = ("abs", "abs_exp")
"""Differences whose slope jumps where the likelihoods are equal."""

_ROUNDING: Final = 64
"""Units in the last place, of 1 + the nats on both sides, within which likelihoods count as equal
where the slope jumps. A token's log-probability over 128,256 columns was off by up to 52 of
1 + its nats, by torch.log_softmax in fp32."""

LARGEST_LOG_RATIO: Final = 10.0
"""log(P / Q) above which ``joschu_k3`` continues as its tangent, since exp would overflow."""


def binary_divergence(
    teacher: torch.Tensor,
    student: torch.Tensor,
    *,
    difference: Difference = "binary_kl",
    temperature: float = 5.0,
    coin: float = 0.01,
    renyi_alpha: float = 0.5,
) -> torch.Tensor:
    """Difference of ``P = exp(teacher)`` and ``Q = exp(student)``, with the student's graph.

    Args:
        teacher: Log-probabilities, finite, at most 0; fp32 or fp64.
        student: The same shape and dtype.
        temperature: tau; ``binary_kl_temp_limit`` and ``abs`` have none.
        coin: Nats subtracted from both log-probabilities first, as if a coin of probability
            ``exp(-coin)`` belonged to the event. So no event is certain, and log(1 - Q) has a
            bounded derivative, at most 1 / (1 - exp(-coin / tau)). Equal likelihoods stay equal.
        renyi_alpha: Order of ``renyi``, above 0 and other than 1.

    ``abs`` and ``abs_exp`` are exactly 0, and so is their gradient, where the two differ by no more
    than the rounding of log-probabilities that were computed in different ways.
    """
    if difference in _KINKED:
        student = torch.where(_is_rounding(teacher, student), teacher, student)
    x, y = teacher - coin, student - coin
    if difference == "binary_kl_temp_limit":
        return (x - y) + x * torch.log(y / x)
    if difference == "abs":
        return (x - y).abs()
    x, y = x / temperature, y / temperature
    if difference == "renyi":
        return _renyi(x, y, renyi_alpha)
    return _TEMPERED[difference](x, y)


class BinaryOptions(NamedTuple):
    """Options of ``binary_divergence``."""

    difference: Difference = "binary_kl"
    temperature: float = 5.0
    coin: float = 0.01
    renyi_alpha: float = 0.5


class EventDifferences(NamedTuple):
    """Differences of the models' likelihoods, [C] each; arbitrary where it is not ``kept``."""

    loss: torch.Tensor
    """With a graph to the student's log-probabilities."""

    student_nats: torch.Tensor
    """Negative log-probabilities, at least 0."""

    teacher_nats: torch.Tensor

    kept: torch.Tensor
    """bool: compared, and no model gives the event the probability 0."""


def compare_events(
    teacher: torch.Tensor,
    student: torch.Tensor,
    compared: torch.Tensor,
    options: BinaryOptions,
    *,
    implementation: Implementation = "auto",
) -> EventDifferences:
    """``binary_divergence`` of events, some of which are left out; by kernel one launch.

    Args:
        teacher: Log-probabilities [C], fp32 or fp64. One above 0, by rounding, counts as 0. NaN is
            not left out: it must show in the loss.
        student: The same shape and dtype, with a graph or without.
        compared: bool [C]; the numbers of other events are ignored, NaN included.
    """
    if student.dtype == torch.float32 and uses_triton(implementation, student):
        return _by_kernel(teacher, student, compared, options)
    kept = compared & (student != -torch.inf) & (teacher != -torch.inf)
    # Values left out become an ordinary number first: the gradient of a where() is 0 only where
    # both sides are finite.
    own, its = (torch.where(kept, nats, -1.0) for nats in (student, teacher))
    # Not clamp, whose gradient at the bound depends on the release of torch.
    own, its = (torch.where(nats > 0, 0.0, nats) for nats in (own, its))
    loss = binary_divergence(its, own, **options._asdict())
    return EventDifferences(loss, -own.detach(), -its, kept)


def _by_kernel(
    teacher: torch.Tensor, student: torch.Tensor, compared: torch.Tensor, options: BinaryOptions
) -> EventDifferences:
    from megatron_ext.ops.likelihood_kernels import compare_events_kernel

    count, block = len(student), small_block(len(student), _BLOCK)
    own = student.detach()
    numbers, kept = own.new_empty(4, count), torch.empty_like(compared)
    if count:
        compare_events_kernel[(-(-count // block),)](
            own,
            teacher,
            compared,
            count,
            options.temperature,
            options.coin,
            options.renyi_alpha,
            numbers,
            kept,
            DIFFERENCE=options.difference,
            BLOCK=block,
        )
    loss, student_nats, teacher_nats, slope = numbers.unbind()
    return EventDifferences(with_slope(student, loss, slope), student_nats, teacher_nats, kept)


def check_binary_divergence(
    objective: str,
    *,
    difference: Difference,
    temperature: float,
    coin: float,
    renyi_alpha: float,
) -> None:
    """Check the options of ``binary_divergence``.

    Raises:
        LossError: An unknown difference, a temperature or coin that is not positive and finite, or
            an order that is not above 0 or is 1.
    """
    if difference not in get_args(Difference):
        raise LossError(
            f"unknown difference of the objective {objective}",
            got=repr(difference),
            expected=f"one of {', '.join(get_args(Difference))}",
        )
    for name, value in (("temperature", temperature), ("coin", coin)):
        if not (math.isfinite(value) and value > 0):
            raise LossError(
                f"the {name} of the objective {objective} must be positive",
                got=value,
                expected="above 0",
            )
    if not (math.isfinite(renyi_alpha) and renyi_alpha > 0 and renyi_alpha != 1):
        raise LossError(
            f"the objective {objective} has no Renyi divergence of this order",
            got=renyi_alpha,
            expected="above 0 and other than 1",
            fix="take the difference binary_kl for the order 1",
        )


def _is_rounding(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    unit = torch.finfo(student.dtype).eps * (1 - teacher - student.detach())
    return (teacher - student.detach()).abs() <= _ROUNDING * unit


def _binary_kl(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.exp() * (x - y) - torch.expm1(x) * (log1mexp(x) - log1mexp(y))


def _binary_ce(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.expm1(x) * log1mexp(y) - x.exp() * y


def _reverse_binary_kl(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _binary_kl(y, x)


def _abs_exp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.exp() - y.exp()).abs()


def _joschu_k2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).square() / 2


def _joschu_k3(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ratio = x - y
    is_beyond = ratio > LARGEST_LOG_RATIO
    inside = torch.where(is_beyond, LARGEST_LOG_RATIO, ratio)
    # Apart from ``inside``: a gradient that goes both ways would lose the digits of a small one.
    beyond = torch.where(is_beyond, ratio - LARGEST_LOG_RATIO, 0.0)
    return torch.expm1(inside) - inside + math.expm1(LARGEST_LOG_RATIO) * beyond


def _renyi(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    happened = alpha * x + (1 - alpha) * y
    missed = alpha * log1mexp(x) + (1 - alpha) * log1mexp(y)
    return torch.logaddexp(happened, missed) / (alpha - 1)


_TEMPERED: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "binary_kl": _binary_kl,
    "binary_ce": _binary_ce,
    "reverse_binary_kl": _reverse_binary_kl,
    "abs_exp": _abs_exp,
    "joschu_k2": _joschu_k2,
    "joschu_k3": _joschu_k3,
}

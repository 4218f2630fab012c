"""Arithmetic of single probabilities in Triton kernels, from their logarithms."""

import triton
import triton.language as tl

from megatron_ext.ops.triton_math import LOG_TINY, divergence_terms


@triton.jit
def lost_share(log_share):
    """``1 - exp(log_share)`` of a logarithm that is 0 or less, small ones to all their digits."""
    series = 1 / 720 + log_share / 5040
    series = 1 / 120 + log_share * series
    series = 1 / 24 + log_share * series
    series = 1 / 6 + log_share * series
    series = 1 / 2 + log_share * series
    series = log_share * (1 + log_share * series)
    return -tl.where(log_share > -0.25, series, tl.exp(log_share) - 1)


@triton.jit
def log_of_one_and(x):
    """``log(1 + x)`` of an ``x`` from 0 to 1, small ones to all their digits."""
    series = x * (1 - x * (1 / 2 - x * (1 / 3 - x / 4)))
    return tl.where(x < 0.01, series, tl.log(1 + x))


@triton.jit
def log_add(first, second):
    """``log(exp(first) + exp(second))``, -inf where both are; NaN where one is."""
    top = tl.where(first > second, first, second)
    low = tl.where(first > second, second, first)
    # The smaller one may be -inf, both may be.
    distance = tl.where(top == low, 0.0, low - top)
    both = top + log_of_one_and(tl.exp(distance))
    return tl.where((top != top) | (low != low), first + second, both)


@triton.jit
def event_terms(log_p, log_q, mixture, DIRECTION: tl.constexpr):
    """Terms of D of one event from its log-probabilities, -inf of one without mass."""
    p, q = tl.exp(log_p), tl.exp(log_q)
    no_mass = log_q == -float("inf")
    log_p = tl.where(log_p == -float("inf"), LOG_TINY, log_p)
    log_q = tl.where(no_mass, LOG_TINY, log_q)
    if DIRECTION == "jensen_shannon":
        log_mix = log_add(log_p + tl.log(mixture), log_q + tl.log(1.0 - mixture))
        log_p, log_q = log_p - log_mix, log_q - log_mix
    return divergence_terms(p, q, log_p, log_q, no_mass, mixture, DIRECTION)

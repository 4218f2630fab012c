"""Arithmetic shared by Triton kernels: running sums of exponentials, divergences, scaled rows."""

import torch
import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.launch import interpreted

UNPACKS: tl.constexpr = tl.constexpr(not interpreted() and torch.version.hip is None)
"""Whether ``widened`` may ask for instructions of NVIDIA's GPUs by name."""

LOG_TINY: tl.constexpr = tl.constexpr(-87.33654475055310898657)
"""Logarithm of the smallest normal number of fp32."""

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""Factor from nats to bits: ``exp2`` is one instruction, ``exp`` a product more."""

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
"""Factor from bits to nats, of what has been added up."""

FAR_BELOW: tl.constexpr = tl.constexpr(-1e30)
"""A finite logarithm in the place of -inf, where a probability of 0 is its factor."""

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
"""A peak before the first value, the smallest finite number: -inf less itself would be NaN."""

FLOOR: tl.constexpr = tl.constexpr(1024 * 1.1754943508222875e-38)
"""``probability_floor`` of fp32."""


@triton.jit
def widened(logits):
    """Logits in fp32.

    A register has two of bf16, whose bits are the upper ones of fp32: one instruction for each,
    where the compiler takes two for the second.
    """
    if UNPACKS and logits.dtype == tl.bfloat16 and logits.numel > 1:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [logits],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        wide = logits.to(tl.float32)
    return wide


@triton.jit
def scaled(logits, temperature, HAS_TEMPERATURE: tl.constexpr):
    """Logits in fp32, over the temperature."""
    wide = widened(logits)
    if HAS_TEMPERATURE:
        # One division a row.
        wide = wide * (1.0 / temperature)
    return wide


@triton.jit
def row_values(start_of_row, columns, held, inside):
    """A row's logits at ``columns`` in fp32, -inf where not ``inside``.

    All columns ``held`` in memory are loaded, padding too: a padded row ends at a multiple of 16
    columns, so that a thread loads 16 bytes at once. A mask that ends elsewhere makes it load them
    one by one.
    """
    loaded = tl.load(start_of_row + columns, mask=held, other=-float("inf"))
    return tl.where(inside, loaded.to(tl.float32), -float("inf"))


@triton.jit
def lane_sums(peak, total, part_total, values, is_part, HAS_PART: tl.constexpr):
    """Peaks and sums [LANES] after a block of values [LANES, K]: what a thread adds by itself.

    ``part_total`` is the sum of those that are ``is_part``, over the same peak.
    """
    top = tl.maximum(peak, tl.max(values, axis=1))
    # The difference first, which is exact for large logits where their product is not.
    terms = tl.exp2((values - top[:, None]) * LOG2_E)
    kept = tl.exp2((peak - top) * LOG2_E)
    total = total * kept + tl.sum(terms, axis=1)
    if HAS_PART:
        part_total = part_total * kept + tl.sum(tl.where(is_part, terms, 0.0), axis=1)
    return top, total, part_total


@triton.jit
def merged_lanes(peak, total, part_total):
    """Peak and sums of a row from those of its lanes."""
    best = tl.max(peak, axis=0)
    weights = tl.exp2((peak - best) * LOG2_E)
    return best, tl.sum(total * weights, axis=0), tl.sum(part_total * weights, axis=0)


@triton.jit
def first_column(
    start_of_row,
    peak,
    first,
    best,
    end,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
):
    """First column of a row's peak ``best``, 0 where no lane [LANES] of K columns has it.

    ``first`` is the start of the block in which each lane reached its own ``peak``.
    """
    # NaN equals no peak: the end is where nothing is loaded.
    lane = tl.min(tl.where(peak == best, first + tl.arange(0, LANES) * K, end), axis=0)
    columns = lane + tl.arange(0, K)
    loaded = tl.load(start_of_row + columns, mask=columns < end, other=-float("inf"))
    values = scaled(loaded, temperature, HAS_TEMPERATURE)
    column = tl.min(tl.where(values == best, columns, end), axis=0)
    return tl.where(column < end, column, 0)


@triton.jit
def finite_peak(peak):
    """``peak``, 0 where there was no value."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def floored(log_probs):
    """Log-probabilities with ``LOG_TINY`` in the place of -inf."""
    return tl.where(log_probs == -float("inf"), LOG_TINY, log_probs)


@triton.jit
def floored_bits(log_probs):
    """Logarithms to base 2 with that of the smallest normal number in the place of -inf."""
    return tl.where(log_probs == -float("inf"), -126.0, log_probs)


@triton.jit
def row_terms(log_p, log_q, mixture, DIRECTION: tl.constexpr):
    """``q``, ``slope`` and what a row adds up, from logarithms to base 2, which may be -inf.

    ``value`` and ``slope`` are ``p (log p - log q)`` and p where the student has mass (forward),
    nothing and ``log q/p`` (reverse), ``p log p/m`` and ``log q/m``; ``row_divergence`` and
    ``row_gradient`` make D and its gradient of them. The last are ``p log p``.
    """
    p = tl.exp2(log_p)
    q = tl.exp2(log_q)
    information = tl.maximum(log_p, FAR_BELOW)
    value = 0.0 * p
    if DIRECTION == "forward":
        value = p * (information - floored_bits(log_q))
        slope = tl.where(log_q == -float("inf"), 0.0, p)
    elif DIRECTION == "reverse":
        slope = tl.maximum(log_q, FAR_BELOW) - floored_bits(log_p)
    else:
        # log(P / M) and log(Q / M) from the smaller of the two ratios, which cannot overflow.
        ratio = floored_bits(log_q) - floored_bits(log_p)
        of_larger = tl.where(ratio <= 0.0, mixture, 1.0 - mixture)
        log_share = tl.log2(of_larger + (1.0 - of_larger) * tl.exp2(-tl.abs(ratio)))
        value = -p * (log_share + tl.maximum(ratio, 0.0))
        slope = tl.minimum(ratio, 0.0) - log_share
    return value, slope, q, p * information


@triton.jit
def row_divergence(value, slope, mixture, DIRECTION: tl.constexpr):
    """D and the sum of its slopes, from sums of ``value`` and of ``q slope`` (forward: of p).

    The slope of the reverse KL leaves out Q, which (3) takes out again.
    """
    if DIRECTION == "forward":
        divergence = value * LN_2
        total = -slope
    else:
        total = slope * LN_2
        divergence = total
        if DIRECTION == "jensen_shannon":
            total = total * (1.0 - mixture)
            divergence = mixture * value * LN_2 + total
    return divergence, total


@triton.jit
def row_gradient(q, slope, on_q, on_slope, DIRECTION: tl.constexpr):
    """Gradient of D and of ``on_q`` times the sum of q, by two factors of the row."""
    if DIRECTION == "forward":
        gradient = q * on_q - slope * on_slope
    else:
        gradient = q * (slope * on_slope + on_q)
    return gradient


@triton.jit
def row_bits(values, peak, log_sum):
    """Log-probabilities to base 2; ``log_sum`` is to base 2 too."""
    # The difference first, which is exact for large logits where their product is not.
    return (values - peak) * LOG2_E - log_sum


@triton.jit
def divergence_terms(p, q, log_p, log_q, no_mass, mixture, DIRECTION: tl.constexpr):
    """Terms of D and of its slope by log Q, as in ``ops/divergence``.

    ``log_p`` and ``log_q`` are finite, of any common shift; for ``jensen_shannon`` they are those
    of P and Q over their mixture. Where the student has ``no_mass``, it has no slope.
    """
    if DIRECTION == "forward":
        value = p * (log_p - log_q)
        slope = tl.where(no_mass, 0.0, -p)
    elif DIRECTION == "reverse":
        value = q * (log_q - log_p)
        slope = value + q
    else:
        slope = q * log_q * (1.0 - mixture)
        value = mixture * p * log_p + slope
    return value, slope


@triton.jit
def projected_terms(p, log_p, projected, log_projected, mass, mixture, DIRECTION: tl.constexpr):
    """Terms of D and ``dD/dQ``, columns independent of one another, as in ``ops/divergence``."""
    log_q = log_projected - tl.log(mass)
    if DIRECTION == "forward":
        value = p * (log_p - log_q)
        slope = -(p / tl.where(projected < FLOOR, FLOOR, projected)) * mass
    else:
        q = projected / mass
        if DIRECTION == "reverse":
            slope = log_q - log_p
            value = q * slope
        else:
            mixed = mixture * p + (1 - mixture) * q
            log_mix = tl.log(tl.where(mixed < FLOOR, FLOOR, mixed))
            slope = (log_q - log_mix) * (1 - mixture)
            value = mixture * p * (log_p - log_mix) + q * slope
    return value, slope


@triton.jit
def kept_terms(
    p,
    log_p,
    projected,
    log_projected,
    in_rest,
    rest_p,
    rest_projected,
    mass,
    mixture,
    DIRECTION: tl.constexpr,
):
    """``projected_terms`` of columns of which those ``in_rest`` are compared as one.

    These have the slope of the rest, whose masses are given, and no terms.
    """
    log_rest_p = tl.log(tl.where(rest_p < FLOOR, FLOOR, rest_p))
    log_rest = tl.log(tl.where(rest_projected < FLOOR, FLOOR, rest_projected))
    value, slope = projected_terms(
        tl.where(in_rest, rest_p, p),
        tl.where(in_rest, log_rest_p, log_p),
        tl.where(in_rest, rest_projected, projected),
        tl.where(in_rest, log_rest, log_projected),
        mass,
        mixture,
        DIRECTION,
    )
    return tl.where(in_rest, 0.0, value), slope


@triton.jit
def exp_less_one(x):
    """``exp(x) - 1``, small ones to all their digits."""
    series = 1 / 720 + x / 5040
    series = 1 / 120 + x * series
    series = 1 / 24 + x * series
    series = 1 / 6 + x * series
    series = 1 / 2 + x * series
    series = x * (1 + x * series)
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1)


@triton.jit
def lost_share(log_share):
    """``1 - exp(log_share)`` of a logarithm that is 0 or less."""
    return -exp_less_one(log_share)


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


@kernel(
    do_not_specialize=["arrives_stride", "own_stride", "chunks"],
    do_not_specialize_on_alignment=["arrives_ptr", "own_ptr", "slot_ptr"],
)
def scale_to_kernel(
    gradient_ptr,
    arrives_ptr,
    arrives_stride,
    own_ptr,
    own_stride,
    common,
    slot_ptr,
    chunks,
    row_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Multiply rows by what arrives for them, or for their chunks, over what they were written for;
    one program for each row and block of columns.

    That is ``own``, 0 of rows that hold 0, or ``common`` to all. Strides are 0 where one number is
    that of all rows. Rows of no chunk stay as they are.
    """
    row = tl.program_id(0).to(tl.int64)
    place = row
    if slot_ptr is not None:
        place = tl.load(slot_ptr + row)
    is_scaled = (place >= 0) & (place < chunks)
    scale = tl.load(arrives_ptr + place * arrives_stride, mask=is_scaled, other=1.0)
    if own_ptr is not None:
        own = tl.load(own_ptr + place * own_stride, mask=is_scaled, other=0.0)
        # Exact: the plain quotient of equal numbers may not be 1, and a row at 1 is left alone.
        scale = tl.where(own == 0.0, 1.0, tl.div_rn(scale, tl.where(own == 0.0, 1.0, own)))
    else:
        scale = tl.where(is_scaled, tl.div_rn(scale, common), 1.0)
    if scale != 1.0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        at = gradient_ptr + row * row_stride + columns
        gradient = tl.load(at, mask=inside, other=0.0)
        product = tl.where(scale == 0.0, 0.0, gradient.to(tl.float32) * scale)
        tl.store(at, product.to(gradient.dtype), mask=inside)

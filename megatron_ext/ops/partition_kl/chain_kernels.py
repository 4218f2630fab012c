"""Triton kernel of the events of chains: a program for each chain. README, equations 4 to 8.

S steps, H chains, E completions of one model; N = S + E chosen columns, R = S + H rows.
"""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import divergence_terms, floored

IMPOSSIBLE = tl.constexpr(-1e9)
LOWEST = tl.constexpr(-3.4028234663852886e38)
LAST = tl.constexpr(2147483647)
"""Place of the rest, behind all completions."""


@triton.jit
def log_sigmoid(value):
    """``log(1 / (1 + exp(-value)))``, small ones to all their digits."""
    small = tl.exp(-tl.abs(value))
    series = small * (1.0 - small * (1 / 2 - small * (1 / 3 - small / 4)))
    return tl.minimum(value, 0.0) - tl.where(small < 0.01, series, tl.log(1.0 + small))


@triton.jit
def with_term(peak, total, value):
    """Peak and sum of exponentials with one more value."""
    top = tl.maximum(peak, value)
    return top, total * tl.exp(peak - top) + tl.exp(value - top)


@triton.jit
def step_masses(chosen_ptr, rest_ptr, step, HAS_MASSES: tl.constexpr):
    """Log-masses of a step's observed token and of all others."""
    chosen, rest = tl.load(chosen_ptr + step), tl.load(rest_ptr + step)
    if not HAS_MASSES:
        margin = chosen - rest
        chosen, rest = log_sigmoid(margin), log_sigmoid(-margin)
    return chosen, rest


@triton.jit
def chain_sums(
    chosen_ptr,
    rest_ptr,
    step_ptr,
    steps,
    chain,
    first,
    stop,
    HAS_MASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-masses of a chain's prefix, of its last row's other columns, and of the rest; and the
    log-sum-exp of that row."""
    prefix = tl.full((), 0.0, tl.float32)
    peak = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for step in range(tl.load(step_ptr + chain), tl.load(step_ptr + chain + 1)):
        taken, left = step_masses(chosen_ptr, rest_ptr, step, HAS_MASSES)
        peak, total = with_term(peak, total, prefix + left)
        prefix += taken
    others = tl.load(rest_ptr + steps + chain)
    last = tl.full((), 0.0, tl.float32)
    if not HAS_MASSES:
        top = others
        sum_of_last = tl.full((), 1.0, tl.float32)
        for begin in range(first, stop, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            inside = place < stop
            logits = tl.load(chosen_ptr + steps + place, mask=inside, other=-float("inf"))
            higher = tl.maximum(top, tl.max(logits, axis=0))
            sum_of_last = sum_of_last * tl.exp(top - higher)
            sum_of_last += tl.sum(tl.exp(logits - higher), axis=0)
            top = higher
        last = top + tl.log(sum_of_last)
    others = others - last
    peak, total = with_term(peak, total, prefix + others)
    return prefix, others, peak + tl.log(total), last


@triton.jit
def event_masses(chosen_ptr, place, stop, shift, temperature):
    """Logarithms of the events' masses over the temperature, -inf where there is no event."""
    inside = place < stop
    mass = tl.load(chosen_ptr + place, mask=inside, other=0.0) + shift
    return tl.where(inside & (mass >= IMPOSSIBLE / 2), mass / temperature, -float("inf"))


@triton.jit
def normaliser(chosen_ptr, first, stop, shift, rest, temperature, BLOCK: tl.constexpr):
    """Log-sum-exp of a chain's events and its rest over the temperature."""
    peak = rest / temperature
    total = tl.full((), 1.0, tl.float32)
    for begin in range(first, stop, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        masses = event_masses(chosen_ptr, place, stop, shift, temperature)
        top = tl.maximum(peak, tl.max(masses, axis=0))
        total = total * tl.exp(peak - top) + tl.sum(tl.exp(masses - top), axis=0)
        peak = top
    return peak + tl.log(total)


@triton.jit
def rest_probability(rest, temperature, whole):
    """Logarithm of the rest's probability, -inf where it is impossible."""
    return tl.where(rest < IMPOSSIBLE / 2, -float("inf"), rest / temperature - whole)


@triton.jit
def event_terms(log_p, log_q, mixture, DIRECTION: tl.constexpr):
    """Terms of D and of its slope by log Q, and Q."""
    p, q = tl.exp(log_p), tl.exp(log_q)
    above, below = floored(log_p), floored(log_q)
    if DIRECTION == "jensen_shannon":
        first, second = above + tl.log(mixture), below + tl.log(1.0 - mixture)
        top = tl.maximum(first, second)
        mixed = top + tl.log(tl.exp(first - top) + tl.exp(second - top))
        above, below = above - mixed, below - mixed
    value, slope = divergence_terms(p, q, above, below, log_q == -float("inf"), mixture, DIRECTION)
    return value, slope, q


@triton.jit
def first_of(best, chosen, values, place):
    """The largest value so far, and the first place that has it."""
    top = tl.max(values, axis=0)
    place = tl.min(tl.where(values == top, place, LAST), axis=0)
    return tl.maximum(best, top), tl.where(top > best, place, chosen)


@kernel(
    do_not_specialize=["student_steps", "teacher_steps"],
    # Parts of longer vectors.
    do_not_specialize_on_alignment=["counted_ptr", "scale_ptr"],
)
def compare_chains_kernel(
    student_chosen_ptr,
    student_others_ptr,
    student_step_ptr,
    student_steps,
    teacher_chosen_ptr,
    teacher_others_ptr,
    teacher_step_ptr,
    teacher_steps,
    completion_ptr,
    counted_ptr,
    scale_ptr,
    temperature,
    mixture,
    divergence_ptr,
    student_rest_ptr,
    teacher_rest_ptr,
    agreement_ptr,
    chosen_gradient_ptr,
    others_gradient_ptr,
    DIRECTION: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compare one chain, and write the gradient of the student's logits at its rows.

    ``chosen`` [N] and ``others`` [R] are logits, or with ``HAS_MASSES`` the teacher's are
    log-masses. ``step`` and ``completion`` [H + 1] are where each chain's begin. A chain that is
    not counted, or has the scale 0, gets a gradient of 0.
    """
    chain = tl.program_id(0)
    first, stop = tl.load(completion_ptr + chain), tl.load(completion_ptr + chain + 1)
    prefix, others, student_rest, last = chain_sums(
        student_chosen_ptr,
        student_others_ptr,
        student_step_ptr,
        student_steps,
        chain,
        first,
        stop,
        False,
        BLOCK,
    )
    teacher_prefix, _its_others, teacher_rest, teacher_last = chain_sums(
        teacher_chosen_ptr,
        teacher_others_ptr,
        teacher_step_ptr,
        teacher_steps,
        chain,
        first,
        stop,
        HAS_MASSES,
        BLOCK,
    )
    own_ptr, its_ptr = student_chosen_ptr + student_steps, teacher_chosen_ptr + teacher_steps
    shift, its_shift = prefix - last, teacher_prefix - teacher_last
    whole = normaliser(own_ptr, first, stop, shift, student_rest, temperature, BLOCK)
    its_whole = normaliser(its_ptr, first, stop, its_shift, teacher_rest, temperature, BLOCK)
    log_q = rest_probability(student_rest, temperature, whole)
    log_p = rest_probability(teacher_rest, temperature, its_whole)

    value, rest_slope, rest_q = event_terms(log_p, log_q, mixture, DIRECTION)
    slope = tl.full((), 0.0, tl.float32)
    q = tl.full((), 0.0, tl.float32)
    best_q = tl.full((), -float("inf"), tl.float32)
    best_p = tl.full((), -float("inf"), tl.float32)
    at_q = tl.full((), LAST, tl.int32)
    at_p = tl.full((), LAST, tl.int32)
    for begin in range(first, stop, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        event_q = event_masses(own_ptr, place, stop, shift, temperature) - whole
        event_p = event_masses(its_ptr, place, stop, its_shift, temperature) - its_whole
        values, slopes, probabilities = event_terms(event_p, event_q, mixture, DIRECTION)
        inside = place < stop
        value += tl.sum(tl.where(inside, values, 0.0), axis=0)
        slope += tl.sum(tl.where(inside, slopes, 0.0), axis=0)
        q += tl.sum(tl.where(inside, probabilities, 0.0), axis=0)
        best_q, at_q = first_of(best_q, at_q, event_q, place)
        best_p, at_p = first_of(best_p, at_p, event_p, place)
    counted = tl.load(counted_ptr + chain)
    tl.store(divergence_ptr + chain, tl.where(counted, value, 0.0))
    tl.store(student_rest_ptr + chain, tl.exp(log_q))
    tl.store(teacher_rest_ptr + chain, tl.exp(log_p))
    at_q = tl.where(log_q > best_q, LAST, at_q)
    at_p = tl.where(log_p > best_p, LAST, at_p)
    tl.store(agreement_ptr + chain, at_q == at_p)

    if HAS_GRADIENT:
        scale = tl.load(scale_ptr + chain)
        is_used = counted & (scale != 0.0)
        total, factor = slope + rest_slope, scale / temperature
        on_rest = (rest_slope - rest_q * total) * factor
        on_events = (slope - q * total) * factor
        of_last = tl.exp(prefix + others - student_rest)
        on_last = on_events + on_rest * of_last
        for begin in range(first, stop, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            inside = place < stop
            masses = event_masses(own_ptr, place, stop, shift, temperature)
            event_p = event_masses(its_ptr, place, stop, its_shift, temperature) - its_whole
            values, slopes, probabilities = event_terms(event_p, masses - whole, mixture, DIRECTION)
            logits = tl.load(own_ptr + place, mask=inside, other=0.0)
            gradient = (slopes - probabilities * total) * factor - tl.exp(logits - last) * on_last
            gradient = tl.where((logits > IMPOSSIBLE) & is_used, gradient, 0.0)
            tl.store(chosen_gradient_ptr + student_steps + place, gradient, mask=inside)
        gradient = on_rest * of_last - tl.exp(others) * on_last
        tl.store(others_gradient_ptr + student_steps + chain, tl.where(is_used, gradient, 0.0))
        until = tl.full((), 0.0, tl.float32)
        gone = tl.full((), 0.0, tl.float32)
        for step in range(tl.load(student_step_ptr + chain), tl.load(student_step_ptr + chain + 1)):
            taken, left = step_masses(student_chosen_ptr, student_others_ptr, step, False)
            share = tl.exp(until + left - student_rest)
            gone += share
            until += taken
            # What comes behind the step, of the rest too, follows from its token.
            on_taken = on_events + on_rest * (1.0 - gone)
            margin = on_taken * tl.exp(left) - on_rest * share * tl.exp(taken)
            margin = tl.where(is_used, margin, 0.0)
            is_possible = tl.load(student_chosen_ptr + step) > IMPOSSIBLE
            tl.store(chosen_gradient_ptr + step, tl.where(is_possible, margin, 0.0))
            tl.store(others_gradient_ptr + step, -margin)

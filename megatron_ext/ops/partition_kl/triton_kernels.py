"""Triton kernels of the partition KL: statistics of split rows, values and gradients.

Equations are in the README. A program handles a row of the student; a chunk of one token a side is
the pair of its row and a teacher's.
"""

import triton
import triton.language as tl

from megatron_ext.ops.triton_math import (
    divergence_terms,
    finite_peak,
    floored,
    row_values,
    scaled,
)


@triton.jit(do_not_specialize=["rows"])
def split_statistics_kernel(
    logits_ptr,
    set_ptr,
    bits_ptr,
    sums_ptr,
    column_ptr,
    masked_ptr,
    row_stride,
    width,
    padded_width,
    rows,
    words,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_UNSCALED: tl.constexpr,
    EVERY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Peaks and sums of members and others; ``sums`` is [3, 2, T], see ``split_statistics``."""
    row = tl.program_id(0).to(tl.int64)
    own_set = tl.load(set_ptr + row)
    start_of_row = logits_ptr + row * row_stride
    start_of_bits = bits_ptr + own_set.to(tl.int64) * words
    has_members = own_set >= 0
    peak = -float("inf")
    total = 0.0
    other_peak = -float("inf")
    other_total = 0.0
    raw_peak = -float("inf")
    raw_total = 0.0
    lowest = float("inf")
    column = 0
    end = width
    if not EVERY_ROW:
        end = tl.where(has_members, width, 0)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        held = columns < padded_width
        logits = row_values(start_of_row, columns, held, inside)
        word = tl.load(start_of_bits + columns // 32, mask=inside & has_members, other=0)
        is_member = ((word >> (columns % 32)) & 1) != 0
        values = tl.where(is_member, scaled(logits, temperature, HAS_TEMPERATURE), logits)
        chosen = tl.where(is_member, values, -float("inf"))
        best, place = tl.max(chosen, axis=0, return_indices=True)
        column = tl.where(best > peak, start + place, column)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_member, logits, float("inf")), axis=0))
        top = tl.maximum(peak, best)
        other_top = tl.maximum(
            other_peak, tl.max(tl.where(is_member, -float("inf"), values), axis=0)
        )
        reference = finite_peak(top)
        other_reference = finite_peak(other_top)
        # One exponential an element, since each belongs to one of the sums.
        mass = tl.exp(values - tl.where(is_member, reference, other_reference))
        total = total * tl.exp(peak - reference) + tl.sum(tl.where(is_member, mass, 0.0), axis=0)
        other_total = other_total * tl.exp(other_peak - other_reference) + tl.sum(
            tl.where(is_member, 0.0, mass), axis=0
        )
        peak = top
        other_peak = other_top
        if HAS_UNSCALED:
            raw = tl.where(is_member, logits, -float("inf"))
            raw_top = tl.maximum(raw_peak, tl.max(raw, axis=0))
            raw_reference = finite_peak(raw_top)
            raw_total = raw_total * tl.exp(raw_peak - raw_reference) + tl.sum(
                tl.exp(raw - raw_reference), axis=0
            )
            raw_peak = raw_top
    lane = sums_ptr + row
    tl.store(lane, finite_peak(peak))
    tl.store(lane + rows, total)
    tl.store(lane + 2 * rows, finite_peak(other_peak))
    tl.store(lane + 3 * rows, other_total)
    if HAS_UNSCALED:
        tl.store(lane + 4 * rows, finite_peak(raw_peak))
        tl.store(lane + 5 * rows, raw_total)
    tl.store(column_ptr + row, column)
    tl.store(masked_ptr + row, lowest == -float("inf"))


@triton.jit
def partner_logits(start_of_teacher, start_of_arrived, partner, HAS_ARRIVED: tl.constexpr):
    """The teacher's logits at the partners of some columns, -inf where there is none."""
    found = tl.load(start_of_teacher + partner, mask=partner >= 0, other=-float("inf"))
    if HAS_ARRIVED:
        slot = -2 - partner
        arrived = tl.load(start_of_arrived + slot, mask=slot >= 0, other=-float("inf"))
        found = tl.where(partner <= -2, arrived, found)
    return found


@triton.jit
def divergence_of(log_p, log_q, p, q, mixture, DIRECTION: tl.constexpr):
    """Terms of the value and slopes, as in ``ops/divergence``."""
    no_mass = log_q == -float("inf")
    log_p = floored(log_p)
    log_q = floored(log_q)
    if DIRECTION == "jensen_shannon":
        first = log_p + tl.log(mixture)
        second = log_q + tl.log(1.0 - mixture)
        apart = tl.exp(-tl.abs(first - second))
        log_mix = tl.maximum(first, second) + tl.log(1.0 + apart)
        log_p -= log_mix
        log_q -= log_mix
    return divergence_terms(p, q, log_p, log_q, no_mass, mixture, DIRECTION)


@triton.jit(do_not_specialize=["chunks"])
def masked_mass_kernel(
    logits_ptr,
    teacher_ptr,
    arrived_ptr,
    partner_ptr,
    student_row_ptr,
    teacher_row_ptr,
    norms_ptr,
    is_masked_ptr,
    lost_ptr,
    row_stride,
    teacher_stride,
    arrived_stride,
    width,
    chunks,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ARRIVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Teacher's mass [C] on shared tokens that the student masks; most rows have none."""
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.load(student_row_ptr + chunk)
    start_of_row = logits_ptr + row * row_stride
    start_of_teacher = teacher_ptr + tl.load(teacher_row_ptr + chunk) * teacher_stride
    start_of_arrived = arrived_ptr + chunk * arrived_stride
    p_peak = tl.load(norms_ptr + 2 * chunks + chunk)
    p_log_sum = tl.load(norms_ptr + 3 * chunks + chunk)
    lost = 0.0
    end = tl.where(tl.load(is_masked_ptr + row) != 0, width, 0)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        logits = tl.load(start_of_row + columns, mask=inside, other=0.0).to(tl.float32)
        partner = tl.load(partner_ptr + columns, mask=inside, other=-1)
        partner = tl.where(logits == -float("inf"), partner, -1)
        loaded = partner_logits(start_of_teacher, start_of_arrived, partner, HAS_ARRIVED)
        log_p = scaled(loaded, temperature, HAS_TEMPERATURE) - p_peak - p_log_sum
        lost += tl.sum(tl.where(partner == -1, 0.0, tl.exp(log_p)), axis=0)
    tl.store(lost_ptr + chunk, lost)


@triton.jit(do_not_specialize=["chunks", "rows"])
def single_rows_kernel(
    logits_ptr,
    teacher_ptr,
    arrived_ptr,
    partner_ptr,
    student_row_ptr,
    teacher_row_ptr,
    norms_ptr,
    factors_ptr,
    label_ptr,
    tokens_ptr,
    sums_ptr,
    gradient_ptr,
    row_stride,
    teacher_stride,
    arrived_stride,
    gradient_stride,
    width,
    padded_width,
    chunks,
    rows,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    STORES_SUMS: tl.constexpr,
    STORES_GRADIENT: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ARRIVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one token a side: sums of value and slope, the student's gradient, or both.

    ``norms`` [7, C]: peak and logarithm of the sum of the student's events, of the teacher's, and
    of the student's rest; the probability of that at temperature 1. ``factors`` [3, C]: sum of
    slopes, derivative of the rest's logit, the chunk's upstream gradient over tau. ``tokens``
    [3, T]: peak and logarithm of the sum over all columns, and the weight of the label.
    """
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.load(student_row_ptr + chunk)
    start_of_row = logits_ptr + row * row_stride
    start_of_teacher = teacher_ptr + tl.load(teacher_row_ptr + chunk) * teacher_stride
    start_of_arrived = arrived_ptr + chunk * arrived_stride
    norm = norms_ptr + chunk
    q_peak = tl.load(norm)
    q_log_sum = tl.load(norm + chunks)
    p_peak = tl.load(norm + 2 * chunks)
    p_log_sum = tl.load(norm + 3 * chunks)
    rest_peak = tl.load(norm + 4 * chunks)
    rest_log_sum = tl.load(norm + 5 * chunks)
    if STORES_GRADIENT:
        start_of_gradient = gradient_ptr + row * gradient_stride
        slope_sum = tl.load(factors_ptr + chunk)
        rest_slope = tl.load(factors_ptr + chunks + chunk)
        weight = tl.load(factors_ptr + 2 * chunks + chunk)
        if HAS_LABELS:
            rest_mass = tl.load(norm + 6 * chunks)
            label = tl.load(label_ptr + row)
            whole_peak = tl.load(tokens_ptr + row)
            whole_log_sum = tl.load(tokens_ptr + rows + row)
            token_weight = tl.load(tokens_ptr + 2 * rows + row)
    value_sum = 0.0
    slopes = 0.0
    end = width
    if STORES_GRADIENT:
        end = padded_width
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        held = columns < padded_width
        logits = row_values(start_of_row, columns, held, inside)
        partner = tl.where(inside, tl.load(partner_ptr + columns, mask=held, other=-1), -1)
        is_shared = partner != -1
        loaded = partner_logits(start_of_teacher, start_of_arrived, partner, HAS_ARRIVED)
        log_p = scaled(loaded, temperature, HAS_TEMPERATURE) - p_peak - p_log_sum
        log_q = scaled(logits, temperature, HAS_TEMPERATURE) - q_peak - q_log_sum
        # A shared token's Q, and another token's share of the rest.
        q = tl.exp(tl.where(is_shared, log_q, logits - rest_peak - rest_log_sum))
        value, slope = divergence_of(log_p, log_q, tl.exp(log_p), q, mixture, DIRECTION)
        if STORES_SUMS:
            value_sum += tl.sum(tl.where(is_shared, value, 0.0), axis=0)
            slopes += tl.sum(tl.where(is_shared, slope, 0.0), axis=0)
        if STORES_GRADIENT:
            gradient = tl.where(is_shared, slope - q * slope_sum, q * rest_slope) * weight
            gradient = tl.where(weight == 0.0, 0.0, gradient)
            if HAS_LABELS:
                if HAS_TEMPERATURE:
                    probability = tl.exp(logits - whole_peak - whole_log_sum)
                else:
                    probability = tl.where(is_shared, q, q * rest_mass)
                hit = tl.where(columns == label, 1.0, 0.0)
                token = (probability - hit) * token_weight
                gradient += tl.where(token_weight == 0.0, 0.0, token)
            tl.store(
                start_of_gradient + columns,
                tl.where(inside, gradient, 0.0).to(gradient_ptr.dtype.element_ty),
                mask=held,
            )
    if STORES_SUMS:
        tl.store(sums_ptr + chunk, value_sum)
        tl.store(sums_ptr + chunks + chunk, slopes)


@triton.jit(do_not_specialize=["rows"])
def other_rows_kernel(
    logits_ptr,
    set_ptr,
    rests_ptr,
    label_ptr,
    tokens_ptr,
    gradient_ptr,
    row_stride,
    gradient_stride,
    width,
    padded_width,
    rows,
    HAS_LABELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of all rows but those of singles, without their chosen columns.

    ``rests`` [3, T]: peak and logarithm of the sum over the columns that are not chosen, and the
    derivative of their log-sum-exp; 0 in rows of no chunk. ``tokens`` as above.
    """
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(rests_ptr + row)
    log_sum = tl.load(rests_ptr + rows + row)
    weight = tl.load(rests_ptr + 2 * rows + row)
    token_weight = 0.0
    if HAS_LABELS:
        label = tl.load(label_ptr + row)
        whole_peak = tl.load(tokens_ptr + row)
        whole_log_sum = tl.load(tokens_ptr + rows + row)
        token_weight = tl.load(tokens_ptr + 2 * rows + row)
    end = tl.where(tl.load(set_ptr + row) == 0, 0, padded_width)
    # A row without a weight is not read.
    is_read = (weight != 0.0) | (token_weight != 0.0)
    read_end = tl.where(is_read, width, 0)
    held_end = tl.where(is_read, padded_width, 0)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < read_end
        logits = row_values(logits_ptr + row * row_stride, columns, columns < held_end, inside)
        gradient = tl.where(weight == 0.0, 0.0, tl.exp(logits - peak - log_sum) * weight)
        if HAS_LABELS:
            hit = tl.where(columns == label, 1.0, 0.0)
            token = (tl.exp(logits - whole_peak - whole_log_sum) - hit) * token_weight
            gradient += tl.where(token_weight == 0.0, 0.0, token)
        tl.store(
            gradient_ptr + row * gradient_stride + columns,
            tl.where(inside, gradient, 0.0).to(gradient_ptr.dtype.element_ty),
            mask=columns < padded_width,
        )


@triton.jit(do_not_specialize=["count"])
def store_entries_kernel(
    gradient_ptr, row_ptr, column_ptr, value_ptr, gradient_stride, count, BLOCK: tl.constexpr
):
    """Single entries, each once; those whose column is on another rank are left out."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row = tl.load(row_ptr + entry, mask=inside, other=0)
    column = tl.load(column_ptr + entry, mask=inside, other=-1)
    value = tl.load(value_ptr + entry, mask=inside, other=0.0)
    place = gradient_ptr + row * gradient_stride + column
    tl.store(place, value.to(gradient_ptr.dtype.element_ty), mask=column >= 0)

"""Triton kernels of the partition KL: statistics of split rows, values and gradients.

Equations are in the README. A program handles a row of the student; a chunk of one token a side is
the pair of its row and a teacher's.
"""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import (
    LN_2,
    LOG2_E,
    LOWEST,
    lane_sums,
    merged_lanes,
    row_bits,
    row_divergence,
    row_gradient,
    row_terms,
    row_values,
    scaled,
    widened,
)


@triton.jit
def _first_of(start_of_row, best, peaks, starts, end, K: tl.constexpr):
    """The first column of ``best`` among those of the first lane that has it; ``end`` for none."""
    columns = tl.min(tl.where(peaks == best, starts, end), axis=0) + tl.arange(0, K)
    logits = tl.load(start_of_row + columns, mask=columns < end, other=-float("inf"))
    return tl.min(tl.where(logits == best, columns, end), axis=0)


@kernel(do_not_specialize=["rows"])
def split_statistics_kernel(
    logits_ptr,
    set_ptr,
    bits_ptr,
    sums_ptr,
    column_ptr,
    masked_ptr,
    top_ptr,
    row_stride,
    width,
    padded_width,
    rows,
    words,
    leading,
    members_end,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_UNSCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Peaks and sums of members and others; ``sums`` is [3, 2, T], see ``split_statistics``.

    Each lane of 8 columns has peaks and sums of its own until the row has ended, and a byte that
    says which of them are members. It is not read in whole blocks of the shared tokens before
    ``leading``, nor of the others from ``members_end`` on. ``top`` gets the largest logit's column.
    """
    K: tl.constexpr = 8
    LANES: tl.constexpr = BLOCK // K
    row = tl.program_id(0).to(tl.int64)
    own_set = tl.load(set_ptr + row)
    start_of_row = logits_ptr + row * row_stride
    start_of_bits = bits_ptr + own_set.to(tl.int64) * words
    has_members = own_set >= 0
    lane_start = tl.arange(0, LANES) * K
    block = lane_start[:, None] + tl.arange(0, K)[None, :]
    peak = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    other_peak = tl.full((LANES,), LOWEST, tl.float32)
    other_total = tl.zeros((LANES,), tl.float32)
    raw_peak = tl.full((LANES,), LOWEST, tl.float32)
    raw_total = tl.zeros((LANES,), tl.float32)
    lowest = tl.full((LANES,), float("inf"), tl.float32)
    first = tl.zeros((LANES,), tl.int32)
    other_first = tl.zeros((LANES,), tl.int32)
    raw_first = tl.zeros((LANES,), tl.int32)
    end = tl.where(own_set >= -1, width, 0)
    whole = end // BLOCK * BLOCK
    mixed = tl.where(own_set == 0, tl.minimum(leading // BLOCK * BLOCK, whole), 0)
    mixed_end = tl.where(own_set == 0, members_end, tl.where(has_members, end, 0))
    mixed_end = tl.maximum((mixed_end + BLOCK - 1) // BLOCK * BLOCK, mixed)
    for start in tl.range(0, mixed, BLOCK, num_stages=3):
        logits = tl.load(start_of_row + start + block).to(tl.float32)
        values = scaled(logits, temperature, HAS_TEMPERATURE)
        before = peak
        peak, total, _ = lane_sums(peak, total, total, values, True, False)
        first = tl.where(peak > before, start, first)
        lowest = tl.minimum(lowest, tl.min(logits, axis=1))
        if HAS_UNSCALED:
            before = raw_peak
            raw_peak, raw_total, _ = lane_sums(raw_peak, raw_total, raw_total, logits, True, False)
            raw_first = tl.where(raw_peak > before, start, raw_first)
    for start in tl.range(mixed_end, whole, BLOCK, num_stages=3):
        logits = widened(tl.load(start_of_row + start + block))
        other_before = other_peak
        other_peak, other_total, _ = lane_sums(
            other_peak, other_total, other_total, logits, True, False
        )
        if top_ptr is not None:
            other_first = tl.where(other_peak > other_before, start, other_first)
    # Blocks with both, and what is left after the whole ones.
    between = tl.maximum(tl.minimum(mixed_end, end) - mixed + BLOCK - 1, 0) // BLOCK
    blocks = between + tl.where((whole < end) & (mixed_end <= whole), 1, 0)
    for number in tl.range(0, blocks, num_stages=3):
        start = tl.where(number < between, mixed + number * BLOCK, whole)
        columns = start + block
        logits = row_values(start_of_row, columns, columns < padded_width, columns < width)
        places = start + lane_start
        word = tl.load(start_of_bits + places // 32, mask=(places < width) & has_members, other=0)
        byte = (word >> (places % 32)) & 0xFF
        is_member = ((byte[:, None] >> tl.arange(0, K)[None, :]) & 1) != 0
        values = logits
        if HAS_TEMPERATURE:
            values = tl.where(is_member, scaled(logits, temperature, True), logits)
        before = peak
        peak = tl.maximum(peak, tl.max(tl.where(is_member, values, LOWEST), axis=1))
        first = tl.where(peak > before, start, first)
        other_before = other_peak
        other_best = tl.max(tl.where(is_member, LOWEST, values), axis=1)
        other_peak = tl.maximum(other_peak, other_best)
        if top_ptr is not None:
            # Blocks behind this one may have been read before it.
            comes_first = (other_best == other_before) & (start < other_first)
            comes_first = comes_first | (other_best > other_before)
            other_first = tl.where(comes_first, start, other_first)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_member, logits, float("inf")), axis=1))
        # One exponential an element, since each belongs to one of the sums.
        reference = tl.where(is_member, peak[:, None], other_peak[:, None])
        mass = tl.exp2((values - reference) * LOG2_E)
        total = total * tl.exp2((before - peak) * LOG2_E) + tl.sum(
            tl.where(is_member, mass, 0.0), axis=1
        )
        other_total = other_total * tl.exp2((other_before - other_peak) * LOG2_E) + tl.sum(
            tl.where(is_member, 0.0, mass), axis=1
        )
        if HAS_UNSCALED:
            raw = tl.where(is_member, logits, -float("inf"))
            before = raw_peak
            raw_peak, raw_total, _ = lane_sums(raw_peak, raw_total, raw_total, raw, True, False)
            raw_first = tl.where(raw_peak > before, start, raw_first)
    # The first column of the members' peak, in the first lane that has it.
    best, members, _ = merged_lanes(peak, total, total)
    lane = tl.min(tl.where(peak == best, first + lane_start, end), axis=0)
    columns = lane + tl.arange(0, K)
    inside = columns < end
    logits = tl.load(start_of_row + columns, mask=inside, other=-float("inf"))
    word = tl.load(start_of_bits + columns // 32, mask=inside & has_members, other=0)
    is_best = scaled(logits, temperature, HAS_TEMPERATURE) == best
    is_best = is_best & (((word >> (columns % 32)) & 1) != 0)
    column = tl.min(tl.where(is_best, columns, end), axis=0)
    tl.store(column_ptr + row, tl.where(column < end, column, 0))
    lane = sums_ptr + row
    tl.store(lane, tl.where(members == 0.0, 0.0, best))
    tl.store(lane + rows, members)
    best, others, _ = merged_lanes(other_peak, other_total, other_total)
    if top_ptr is not None:
        other = _first_of(start_of_row, best, other_peak, other_first + lane_start, end, K)
        if HAS_UNSCALED:
            # Logits that differ may be equal over the temperature.
            largest, _, _ = merged_lanes(raw_peak, raw_total, raw_total)
            column = _first_of(start_of_row, largest, raw_peak, raw_first + lane_start, end, K)
        member = tl.load(start_of_row + column, mask=column < end, other=-float("inf"))
        best_other = tl.where(other < end, best, -float("inf"))
        comes_first = (member > best_other) | ((member == best_other) & (column < other))
        top = tl.where(comes_first, column, other)
        tl.store(top_ptr + row, tl.where(top < end, top, 0))
    tl.store(lane + 2 * rows, tl.where(others == 0.0, 0.0, best))
    tl.store(lane + 3 * rows, others)
    if HAS_UNSCALED:
        best, raw_sum, _ = merged_lanes(raw_peak, raw_total, raw_total)
        tl.store(lane + 4 * rows, tl.where(raw_sum == 0.0, 0.0, best))
        tl.store(lane + 5 * rows, raw_sum)
    tl.store(masked_ptr + row, tl.min(lowest, axis=0) == -float("inf"))


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
def _single_block(
    logits,
    partner,
    start_of_teacher,
    start_of_arrived,
    q_peak,
    q_log_sum,
    p_peak,
    p_log_sum,
    rest_peak,
    rest_log_sum,
    on_shared,
    on_rest,
    on_slope,
    weight,
    token_weight,
    rest_mass,
    whole_peak,
    whole_log_sum,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ARRIVED: tl.constexpr,
    MAY_BE_LEFT_OUT: tl.constexpr,
):
    """Terms of the value and of the slope of fp32 logits, and their gradient but for the label's.

    Logarithms of sums are to base 2. ``MAY_BE_LEFT_OUT`` where a weight may be 0: then what it
    weighs may be NaN.
    """
    is_shared = partner != -1
    loaded = partner_logits(start_of_teacher, start_of_arrived, partner, HAS_ARRIVED)
    log_p = row_bits(scaled(loaded, temperature, HAS_TEMPERATURE), p_peak, p_log_sum)
    # A shared token's Q, and another token's share of the rest.
    values = logits
    if HAS_TEMPERATURE:
        values = tl.where(is_shared, scaled(logits, temperature, True), logits)
    log_q = row_bits(
        values,
        tl.where(is_shared, q_peak, rest_peak),
        tl.where(is_shared, q_log_sum, rest_log_sum),
    )
    value, slope, q, _ = row_terms(log_p, log_q, mixture, DIRECTION)
    if DIRECTION == "reverse":
        value = tl.where(is_shared, q * slope, 0.0)
        # That of q log q is 1 more, in bits: the rest's slope, which is added to these, has it.
        slope = tl.where(is_shared, slope + LOG2_E, 0.0)
    elif DIRECTION == "jensen_shannon":
        slope = tl.where(is_shared, slope, 0.0)
        value = tl.where(is_shared, value, 0.0)
    gradient = row_gradient(q, slope, tl.where(is_shared, on_shared, on_rest), on_slope, DIRECTION)
    if MAY_BE_LEFT_OUT:
        gradient = tl.where(weight == 0.0, 0.0, gradient)
    if HAS_TOKENS:
        if HAS_TEMPERATURE:
            token = tl.exp2(row_bits(logits, whole_peak, whole_log_sum)) * token_weight
        else:
            token = q * tl.where(is_shared, token_weight, rest_mass * token_weight)
        gradient += tl.where(token_weight == 0.0, 0.0, token)
    if DIRECTION != "forward":
        slope = q * slope
    return value, slope, gradient


@kernel(do_not_specialize=["chunks"])
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


@kernel(do_not_specialize=["chunks", "rows"])
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
    q_log_sum = tl.load(norm + chunks) * LOG2_E
    p_peak = tl.load(norm + 2 * chunks)
    p_log_sum = tl.load(norm + 3 * chunks) * LOG2_E
    rest_peak = tl.load(norm + 4 * chunks)
    rest_log_sum = tl.load(norm + 5 * chunks) * LOG2_E
    rest_mass = 0.0
    whole_peak = 0.0
    whole_log_sum = 0.0
    token_weight = 0.0
    slope_sum = 0.0
    rest_slope = 0.0
    weight = 1.0
    if STORES_GRADIENT:
        start_of_gradient = gradient_ptr + row * gradient_stride
        slope_sum = tl.load(factors_ptr + chunk)
        rest_slope = tl.load(factors_ptr + chunks + chunk)
        weight = tl.load(factors_ptr + 2 * chunks + chunk)
        if HAS_LABELS:
            rest_mass = tl.load(norm + 6 * chunks)
            whole_peak = tl.load(tokens_ptr + row)
            whole_log_sum = tl.load(tokens_ptr + rows + row) * LOG2_E
            token_weight = tl.load(tokens_ptr + 2 * rows + row)
            label = tl.load(label_ptr + row).to(tl.int32)
            has_label = (label >= 0) & (token_weight != 0.0)
            # Read before the gradient, which may be the student's logits, is written.
            label_logit = tl.load(start_of_row + label, mask=has_label, other=0.0).to(tl.float32)
            label_partner = tl.load(partner_ptr + label, mask=has_label, other=-1)
            tl.debug_barrier()
    K: tl.constexpr = 8
    LANES: tl.constexpr = BLOCK // K
    block = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
    value_sum = tl.zeros((LANES,), tl.float32)
    slopes = tl.zeros((LANES,), tl.float32)
    # What is not asked for may be NaN: a factor of 0 would not do.
    whole = tl.where(weight != 0.0, width // BLOCK * BLOCK, 0)
    on_shared = -slope_sum * weight
    on_rest = rest_slope * weight
    on_slope = weight
    if DIRECTION != "forward":
        on_slope = weight * LN_2
    if DIRECTION == "jensen_shannon":
        on_slope = on_slope * (1.0 - mixture)
    with_shared = on_shared
    with_rest = on_rest
    if HAS_LABELS and not HAS_TEMPERATURE:
        with_shared = on_shared + token_weight
        with_rest = on_rest + tl.where(token_weight == 0.0, 0.0, rest_mass * token_weight)
    for start in tl.range(0, whole, BLOCK, num_stages=3):
        columns = start + block
        value, slope, gradient = _single_block(
            tl.load(start_of_row + columns).to(tl.float32),
            tl.load(partner_ptr + columns),
            start_of_teacher,
            start_of_arrived,
            q_peak,
            q_log_sum,
            p_peak,
            p_log_sum,
            rest_peak,
            rest_log_sum,
            with_shared,
            with_rest,
            on_slope,
            weight,
            token_weight,
            rest_mass,
            whole_peak,
            whole_log_sum,
            temperature,
            mixture,
            DIRECTION,
            HAS_LABELS and HAS_TEMPERATURE,
            HAS_TEMPERATURE,
            HAS_ARRIVED,
            False,
        )
        if STORES_SUMS:
            value_sum += tl.sum(value, axis=1)
            slopes += tl.sum(slope, axis=1)
        if STORES_GRADIENT:
            tl.store(start_of_gradient + columns, gradient.to(gradient_ptr.dtype.element_ty))
    end = width
    if STORES_GRADIENT:
        end = padded_width
    for start in range(whole, end, BLOCK):
        columns = start + block
        inside = columns < width
        held = columns < padded_width
        partner = tl.where(inside, tl.load(partner_ptr + columns, mask=held, other=-1), -1)
        value, slope, gradient = _single_block(
            row_values(start_of_row, columns, held, inside),
            partner,
            start_of_teacher,
            start_of_arrived,
            q_peak,
            q_log_sum,
            p_peak,
            p_log_sum,
            rest_peak,
            rest_log_sum,
            on_shared,
            on_rest,
            on_slope,
            weight,
            token_weight,
            rest_mass,
            whole_peak,
            whole_log_sum,
            temperature,
            mixture,
            DIRECTION,
            HAS_LABELS,
            HAS_TEMPERATURE,
            HAS_ARRIVED,
            True,
        )
        if STORES_SUMS:
            value_sum += tl.sum(value, axis=1)
            slopes += tl.sum(slope, axis=1)
        if STORES_GRADIENT:
            tl.store(
                start_of_gradient + columns,
                tl.where(inside, gradient, 0.0).to(gradient_ptr.dtype.element_ty),
                mask=held,
            )
    if STORES_SUMS:
        divergence, total = row_divergence(
            tl.sum(value_sum, axis=0), tl.sum(slopes, axis=0), mixture, DIRECTION
        )
        if DIRECTION == "reverse":
            divergence = tl.sum(value_sum, axis=0) * LN_2
        tl.store(sums_ptr + chunk, divergence)
        tl.store(sums_ptr + chunks + chunk, total)
    if HAS_LABELS:
        _, _, gradient = _single_block(
            label_logit,
            label_partner,
            start_of_teacher,
            start_of_arrived,
            q_peak,
            q_log_sum,
            p_peak,
            p_log_sum,
            rest_peak,
            rest_log_sum,
            on_shared,
            on_rest,
            on_slope,
            weight,
            token_weight,
            rest_mass,
            whole_peak,
            whole_log_sum,
            temperature,
            mixture,
            DIRECTION,
            HAS_LABELS,
            HAS_TEMPERATURE,
            HAS_ARRIVED,
            True,
        )
        # After what all threads have written there.
        tl.debug_barrier()
        gradient = (gradient - token_weight).to(gradient_ptr.dtype.element_ty)
        tl.store(start_of_gradient + label, gradient, mask=has_label)


@kernel(do_not_specialize=["rows"])
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


@kernel(do_not_specialize=["count"], do_not_specialize_on_alignment=["column_ptr"])
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

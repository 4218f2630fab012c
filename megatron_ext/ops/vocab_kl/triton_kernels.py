"""Triton kernels of the divergence over one vocabulary: row statistics, value and gradient."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import (
    LN_2,
    LOG2_E,
    LOWEST,
    first_column,
    lane_sums,
    merged_lanes,
    row_bits,
    row_divergence,
    row_gradient,
    row_terms,
    row_values,
    scaled,
)


@kernel(do_not_specialize=["rows"])
def pair_statistics_kernel(
    student_ptr,
    teacher_ptr,
    read_ptr,
    peak_ptr,
    total_ptr,
    column_ptr,
    student_stride,
    teacher_stride,
    width,
    held_width,
    rows,
    temperature,
    HAS_READ: tl.constexpr,
    HAS_PLAIN: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row. ``peak`` and ``total`` are [4, T], ``column`` [2, T].

    Student; teacher; teacher where the student has mass; student at temperature 1, if plain. Both
    models' columns from ``width`` to ``held_width`` are padding in memory and are ignored.
    """
    row = tl.program_id(0).to(tl.int64)
    student_row = student_ptr + row * student_stride
    teacher_row = teacher_ptr + row * teacher_stride
    K: tl.constexpr = 8
    LANES: tl.constexpr = BLOCK // K
    places = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
    student_peak = tl.full((LANES,), LOWEST, tl.float32)
    student_total = tl.zeros((LANES,), tl.float32)
    student_first = tl.zeros((LANES,), tl.int32)
    teacher_peak = tl.full((LANES,), LOWEST, tl.float32)
    teacher_total = tl.zeros((LANES,), tl.float32)
    teacher_first = tl.zeros((LANES,), tl.int32)
    shared_total = tl.zeros((LANES,), tl.float32)
    plain_peak = tl.full((LANES,), LOWEST, tl.float32)
    plain_total = tl.zeros((LANES,), tl.float32)
    end = width
    if HAS_READ:
        end = tl.where(tl.load(read_ptr + row) != 0, width, 0)
    for start in tl.range(0, end, BLOCK, num_stages=3):
        columns = start + places
        inside = columns < width
        held = columns < held_width
        student = row_values(student_row, columns, held, inside)
        teacher = row_values(teacher_row, columns, held, inside)

        values = scaled(student, temperature, HAS_TEMPERATURE)
        before = student_peak
        student_peak, student_total, _ = lane_sums(
            student_peak, student_total, student_total, values, True, False
        )
        student_first = tl.where(student_peak > before, start, student_first)
        if HAS_PLAIN:
            plain_peak, plain_total, _ = lane_sums(
                plain_peak, plain_total, plain_total, student, True, False
            )

        others = scaled(teacher, temperature, HAS_TEMPERATURE)
        before = teacher_peak
        is_shared = values != -float("inf")
        teacher_peak, teacher_total, shared_total = lane_sums(
            teacher_peak, teacher_total, shared_total, others, is_shared, True
        )
        teacher_first = tl.where(teacher_peak > before, start, teacher_first)
    best, total, _ = merged_lanes(student_peak, student_total, student_total)
    column = first_column(
        student_row, student_peak, student_first, best, end, temperature, HAS_TEMPERATURE, K, LANES
    )
    tl.store(peak_ptr + row, tl.where(total == 0.0, 0.0, best))
    tl.store(total_ptr + row, total)
    tl.store(column_ptr + row, column)
    best, total, shared = merged_lanes(teacher_peak, teacher_total, shared_total)
    column = first_column(
        teacher_row, teacher_peak, teacher_first, best, end, temperature, HAS_TEMPERATURE, K, LANES
    )
    peak = tl.where(total == 0.0, 0.0, best)
    tl.store(peak_ptr + rows + row, peak)
    tl.store(peak_ptr + 2 * rows + row, peak)
    tl.store(total_ptr + rows + row, total)
    tl.store(total_ptr + 2 * rows + row, shared)
    tl.store(column_ptr + rows + row, column)
    if HAS_PLAIN:
        best, total, _ = merged_lanes(plain_peak, plain_total, plain_total)
        tl.store(peak_ptr + 3 * rows + row, tl.where(total == 0.0, 0.0, best))
        tl.store(total_ptr + 3 * rows + row, total)


@triton.jit
def _pair_block(
    student,
    teacher,
    student_peak,
    student_log_sum,
    teacher_peak,
    teacher_log_sum,
    weight,
    on_q,
    on_slope,
    plain_peak,
    plain_log_sum,
    label_weight,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    MAY_BE_LEFT_OUT: tl.constexpr,
):
    """What logits add to the sums of a row, and their gradient without that at the label."""
    log_q = row_bits(scaled(student, temperature, HAS_TEMPERATURE), student_peak, student_log_sum)
    log_p = row_bits(scaled(teacher, temperature, HAS_TEMPERATURE), teacher_peak, teacher_log_sum)
    value, slope, q, information = row_terms(log_p, log_q, mixture, DIRECTION)
    if MAY_BE_LEFT_OUT:
        slope = tl.where(weight == 0.0, 0.0, slope)
    gradient = row_gradient(q, slope, on_q, on_slope, DIRECTION)
    if HAS_LABELS and HAS_TEMPERATURE:
        plain = tl.exp2(row_bits(student.to(tl.float32), plain_peak, plain_log_sum))
        gradient += plain * label_weight
    if DIRECTION != "forward":
        slope = q * slope
    return value, slope, information, gradient


@kernel(do_not_specialize=["rows"])
def vocab_kl_kernel(
    student_ptr,
    teacher_ptr,
    gradient_ptr,
    vectors_ptr,
    column_ptr,
    sums_ptr,
    student_stride,
    teacher_stride,
    gradient_stride,
    width,
    held_width,
    padded_width,
    rows,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row. ``gradient`` may be ``student``; it has ``padded_width`` columns.

    Both models' columns from ``width`` to ``held_width`` are padding in memory and are ignored.
    ``vectors`` is fp32 [9, T]: the student's peak and log-sum, the teacher's, the sum S of slopes,
    D's gradient times the temperature, the student's peak and log-sum at temperature 1, and the
    cross-entropy's gradient. ``column`` is int64 [T]: the label's, -1 where another rank has it.
    ``sums`` is fp32 [3, T]: of D, of its slope and of the teacher's entropy.
    """
    row = tl.program_id(0).to(tl.int64)
    vectors = vectors_ptr + row
    student_peak = tl.load(vectors)
    student_log_sum = tl.load(vectors + rows) * LOG2_E
    teacher_peak = tl.load(vectors + 2 * rows)
    teacher_log_sum = tl.load(vectors + 3 * rows) * LOG2_E
    centre = tl.load(vectors + 4 * rows)
    weight = tl.load(vectors + 5 * rows)
    student_row = student_ptr + row * student_stride
    teacher_row = teacher_ptr + row * teacher_stride
    label_weight = 0.0
    plain_peak = 0.0
    plain_log_sum = 0.0
    label_column = -1
    # Read before the gradient, which may be the student's logits, is written.
    label_student = 0.0
    label_teacher = 0.0
    if HAS_LABELS:
        plain_peak = tl.load(vectors + 6 * rows)
        plain_log_sum = tl.load(vectors + 7 * rows) * LOG2_E
        label_weight = tl.load(vectors + 8 * rows)
        label_column = tl.load(column_ptr + row).to(tl.int32)
        has_label = (label_column >= 0) & (label_weight != 0.0)
        label_student = tl.load(student_row + label_column, mask=has_label, other=0.0)
        label_teacher = tl.load(teacher_row + label_column, mask=has_label, other=0.0)
        if HAS_GRADIENT:
            tl.debug_barrier()
    # What is not asked for may be NaN: a factor of 0 would not do.
    on_q = tl.where(weight == 0.0, 0.0, -centre * weight)
    if not HAS_TEMPERATURE:
        on_q += label_weight
    on_slope = weight
    if DIRECTION != "forward":
        on_slope = weight * LN_2
    if DIRECTION == "jensen_shannon":
        on_slope = on_slope * (1.0 - mixture)
    K: tl.constexpr = 8
    LANES: tl.constexpr = BLOCK // K
    places = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
    value_sum = tl.zeros((LANES,), tl.float32)
    slope_sum = tl.zeros((LANES,), tl.float32)
    information_sum = tl.zeros((LANES,), tl.float32)
    if HAS_GRADIENT:
        place = gradient_ptr + row * gradient_stride
    # A row without a weight is not read.
    end = tl.where((weight != 0.0) | (label_weight != 0.0), width, 0)
    # One without that of D is read with care: what the teacher says there may be NaN.
    whole = tl.where(weight == 0.0, 0, end // BLOCK * BLOCK)
    for start in tl.range(0, whole, BLOCK, num_stages=3):
        value, slope, information, gradient = _pair_block(
            tl.load(student_row + start + places),
            tl.load(teacher_row + start + places),
            student_peak,
            student_log_sum,
            teacher_peak,
            teacher_log_sum,
            weight,
            on_q,
            on_slope,
            plain_peak,
            plain_log_sum,
            label_weight,
            temperature,
            mixture,
            DIRECTION,
            HAS_LABELS,
            HAS_TEMPERATURE,
            False,
        )
        if HAS_SUMS:
            value_sum += tl.sum(value, axis=1)
            slope_sum += tl.sum(slope, axis=1)
            information_sum += tl.sum(information, axis=1)
        if HAS_GRADIENT:
            tl.store(place + start + places, gradient.to(place.dtype.element_ty))
    for start in range(whole, end, BLOCK):
        columns = start + places
        inside = columns < width
        held = columns < held_width
        value, slope, information, gradient = _pair_block(
            row_values(student_row, columns, held, inside),
            row_values(teacher_row, columns, held, inside),
            student_peak,
            student_log_sum,
            teacher_peak,
            teacher_log_sum,
            weight,
            on_q,
            on_slope,
            plain_peak,
            plain_log_sum,
            label_weight,
            temperature,
            mixture,
            DIRECTION,
            HAS_LABELS,
            HAS_TEMPERATURE,
            True,
        )
        if HAS_SUMS:
            value_sum += tl.sum(value, axis=1)
            slope_sum += tl.sum(slope, axis=1)
            information_sum += tl.sum(information, axis=1)
        if HAS_GRADIENT:
            gradient = tl.where(inside, gradient, 0.0)
            tl.store(
                place + columns, gradient.to(place.dtype.element_ty), mask=columns < padded_width
            )
    if HAS_SUMS:
        divergence, slopes = row_divergence(
            tl.sum(value_sum, axis=0), tl.sum(slope_sum, axis=0), mixture, DIRECTION
        )
        tl.store(sums_ptr + row, divergence)
        tl.store(sums_ptr + rows + row, slopes)
        tl.store(sums_ptr + 2 * rows + row, -tl.sum(information_sum, axis=0) * LN_2)
    if HAS_GRADIENT:
        for start in range(tl.cdiv(end, BLOCK) * BLOCK, padded_width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            nothing = tl.zeros((BLOCK,), dtype=place.dtype.element_ty)
            tl.store(place + columns, nothing, mask=columns < padded_width)
        if HAS_LABELS:
            _, _, _, gradient = _pair_block(
                label_student,
                label_teacher,
                student_peak,
                student_log_sum,
                teacher_peak,
                teacher_log_sum,
                weight,
                on_q,
                on_slope,
                plain_peak,
                plain_log_sum,
                label_weight,
                temperature,
                mixture,
                DIRECTION,
                HAS_LABELS,
                HAS_TEMPERATURE,
                True,
            )
            # After what all threads have written there.
            tl.debug_barrier()
            gradient = (gradient - label_weight).to(place.dtype.element_ty)
            tl.store(place + label_column, gradient, mask=has_label)

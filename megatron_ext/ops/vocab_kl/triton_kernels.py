"""Triton kernels of the divergence over one vocabulary: row statistics, value and gradient."""

import triton
import triton.language as tl

from megatron_ext.ops.triton_math import (
    LOWEST,
    divergence_terms,
    first_column,
    floored,
    lane_sums,
    merged_lanes,
    row_values,
    scaled,
)


@triton.jit
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
def row_terms(log_p, log_q, mixture, DIRECTION: tl.constexpr):
    """Terms of D and of its slope, q, and terms of the teacher's entropy.

    The slope of the reverse KL leaves out Q, which (3) takes out again. Logarithms may be -inf.
    """
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    no_mass = log_q == -float("inf")
    log_p = floored(log_p)
    log_q = floored(log_q)
    information = log_p
    if DIRECTION == "jensen_shannon":
        # log(P / M) and log(Q / M) from the smaller of the two ratios, which cannot overflow.
        ratio = log_q - log_p
        of_larger = tl.where(ratio <= 0.0, mixture, 1.0 - mixture)
        log_share = tl.log(of_larger + (1.0 - of_larger) * tl.exp(-tl.abs(ratio)))
        log_p = -log_share - tl.maximum(ratio, 0.0)
        log_q = tl.minimum(ratio, 0.0) - log_share
    value, slope = divergence_terms(p, q, log_p, log_q, no_mass, mixture, DIRECTION)
    if DIRECTION == "reverse":
        slope = value
    return value, slope, q, -p * information


@triton.jit
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
    student_log_sum = tl.load(vectors + rows)
    teacher_peak = tl.load(vectors + 2 * rows)
    teacher_log_sum = tl.load(vectors + 3 * rows)
    centre = tl.load(vectors + 4 * rows)
    weight = tl.load(vectors + 5 * rows)
    label_weight = 0.0
    if HAS_LABELS:
        plain_peak = tl.load(vectors + 6 * rows)
        plain_log_sum = tl.load(vectors + 7 * rows)
        label_weight = tl.load(vectors + 8 * rows)
        label_column = tl.load(column_ptr + row).to(tl.int32)
    student_row = student_ptr + row * student_stride
    teacher_row = teacher_ptr + row * teacher_stride
    value_sum = 0.0
    slope_sum = 0.0
    entropy = 0.0
    if HAS_GRADIENT:
        place = gradient_ptr + row * gradient_stride
    # A row without a weight is not read.
    used = tl.where((weight != 0.0) | (label_weight != 0.0), padded_width, 0)
    for start in range(0, used, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        held = columns < held_width
        student = row_values(student_row, columns, held, inside)
        teacher = row_values(teacher_row, columns, held, inside)
        log_q = (scaled(student, temperature, HAS_TEMPERATURE) - student_peak) - student_log_sum
        log_p = (scaled(teacher, temperature, HAS_TEMPERATURE) - teacher_peak) - teacher_log_sum
        value, slope, q, uncertainty = row_terms(log_p, log_q, mixture, DIRECTION)
        if HAS_SUMS:
            value_sum += tl.sum(value, axis=0)
            slope_sum += tl.sum(slope, axis=0)
            entropy += tl.sum(uncertainty, axis=0)
        if HAS_GRADIENT:
            gradient = tl.where(weight == 0.0, 0.0, (slope - q * centre) * weight)
            if HAS_LABELS:
                plain = tl.exp(student - plain_peak - plain_log_sum) if HAS_TEMPERATURE else q
                excess = plain - tl.where(columns == label_column, 1.0, 0.0)
                gradient += tl.where(label_weight == 0.0, 0.0, excess * label_weight)
            gradient = tl.where(inside, gradient, 0.0)
            tl.store(
                place + columns, gradient.to(place.dtype.element_ty), mask=columns < padded_width
            )
    if HAS_SUMS:
        tl.store(sums_ptr + row, value_sum)
        tl.store(sums_ptr + rows + row, slope_sum)
        tl.store(sums_ptr + 2 * rows + row, entropy)
    if HAS_GRADIENT:
        for start in range(used, padded_width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            nothing = tl.zeros((BLOCK,), dtype=place.dtype.element_ty)
            tl.store(place + columns, nothing, mask=columns < padded_width)

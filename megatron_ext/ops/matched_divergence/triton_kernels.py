"""Triton kernels of the matched divergence by chunk: values with row slopes, and the gradient."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import mean_probabilities, row_probabilities
from megatron_ext.ops.triton_math import divergence_terms

SUMS: tl.constexpr = tl.constexpr(16)
"""Rows of a chunk that a program holds at once."""


@triton.jit
def _log(probabilities):
    """Logarithm, at least -87.3, that of the smallest normal number; NaN stays."""
    return tl.where(probabilities < 1.1754944e-38, -87.33654, tl.log(probabilities))


@triton.jit
def _terms(p, q, mixture, DIRECTION: tl.constexpr):
    """Terms of the divergence and their derivatives by ``q`` (``ops/divergence``)."""
    log_p = _log(p)
    log_q = _log(q)
    if DIRECTION == "jensen_shannon":
        log_mix = _log(mixture * p + (1.0 - mixture) * q)
        log_p -= log_mix
        log_q -= log_mix
    no_mass = q < 1.1754944e-38
    value, slope = divergence_terms(p, q, log_p, log_q, no_mass, mixture, DIRECTION)
    # 1024 times the smallest normal number, as in torch.
    return value, slope / tl.where(q < 1.2037062e-35, 1.2037062e-35, q)


@triton.jit
def _both_sides(
    student_ptr,
    student_order_ptr,
    student_peak_ptr,
    student_log_sum_ptr,
    student_stride,
    student_begin,
    student_end,
    student_used,
    teacher_ptr,
    teacher_order_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_stride,
    teacher_begin,
    teacher_end,
    teacher_used,
    pairs_ptr,
    moved_row_ptr,
    columns,
    held,
    inside,
    temperature,
    MOVED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """P^ and Q^ at a block of student columns, 0 where not common, and the mask of common ones."""
    pair = tl.load(pairs_ptr + columns, mask=held, other=-1)
    common = inside & (pair >= 0)
    q = mean_probabilities(
        student_ptr,
        student_order_ptr,
        student_begin,
        student_end,
        student_stride,
        student_peak_ptr,
        student_log_sum_ptr,
        columns,
        held,
        common,
        temperature,
        HAS_TEMPERATURE,
    )
    if MOVED:
        p = tl.where(common, tl.load(moved_row_ptr + columns, mask=held, other=0.0), 0.0)
    else:
        p = mean_probabilities(
            teacher_ptr,
            teacher_order_ptr,
            teacher_begin,
            teacher_end,
            teacher_stride,
            teacher_peak_ptr,
            teacher_log_sum_ptr,
            pair,
            common,
            common,
            temperature,
            HAS_TEMPERATURE,
        )
    return p / teacher_used, q / student_used, common


@triton.jit
def compare_kernel(
    student_ptr,
    student_order_ptr,
    student_offsets_ptr,
    student_peak_ptr,
    student_log_sum_ptr,
    student_used_ptr,
    teacher_ptr,
    teacher_order_ptr,
    teacher_offsets_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_used_ptr,
    pairs_ptr,
    moved_ptr,
    value_ptr,
    row_slope_ptr,
    best_ptr,
    column_ptr,
    first_chunk,
    student_stride,
    teacher_stride,
    moved_stride,
    width,
    padded_width,
    column_start,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    MOVED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: value, slope of each row, and largest columns.

    ``value`` [C'] over this rank's columns; ``row_slope`` [T] of its rows, ``sum_v q_i f_q``;
    ``best`` and ``column`` [2, C'], the largest P^ and Q^ and their columns.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = first_chunk + program
    begin = tl.load(student_offsets_ptr + chunk)
    end = tl.load(student_offsets_ptr + chunk + 1)
    teacher_begin = tl.load(teacher_offsets_ptr + chunk)
    teacher_end = tl.load(teacher_offsets_ptr + chunk + 1)
    student_used = tl.load(student_used_ptr + chunk)
    teacher_used = tl.load(teacher_used_ptr + chunk)
    moved_row_ptr = moved_ptr
    if MOVED:
        moved_row_ptr = moved_ptr + program * moved_stride
    lanes = tl.arange(0, SUMS)
    # A single row is the mean itself and is not read again.
    alone = end - begin == 1
    for first in range(begin, tl.maximum(end, begin + 1), SUMS):
        last = tl.where(alone, first, tl.minimum(first + SUMS, end))
        value = 0.0
        whole = 0.0
        slopes = tl.zeros([SUMS], tl.float32)
        p_best = -float("inf")
        q_best = -float("inf")
        p_column = 0
        q_column = 0
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            held = columns < padded_width
            p, q, common = _both_sides(
                student_ptr,
                student_order_ptr,
                student_peak_ptr,
                student_log_sum_ptr,
                student_stride,
                begin,
                end,
                student_used,
                teacher_ptr,
                teacher_order_ptr,
                teacher_peak_ptr,
                teacher_log_sum_ptr,
                teacher_stride,
                teacher_begin,
                teacher_end,
                teacher_used,
                pairs_ptr,
                moved_row_ptr,
                columns,
                held,
                inside,
                temperature,
                MOVED,
                HAS_TEMPERATURE,
                BLOCK,
            )
            terms, slope = _terms(p, q, mixture, DIRECTION)
            value += tl.sum(tl.where(common, terms, 0.0), axis=0)
            whole += tl.sum(tl.where(common, q * slope, 0.0), axis=0)
            for place in range(first, last):
                row = tl.load(student_order_ptr + place).to(tl.int64)
                own = row_probabilities(
                    student_ptr,
                    row,
                    student_stride,
                    student_peak_ptr,
                    student_log_sum_ptr,
                    columns,
                    held,
                    common,
                    temperature,
                    HAS_TEMPERATURE,
                )
                share = tl.sum(tl.where(common, own * slope, 0.0), axis=0)
                slopes += tl.where(lanes == place - first, share, 0.0)
            top, index = tl.max(tl.where(inside, p, -float("inf")), axis=0, return_indices=True)
            p_column = tl.where(top > p_best, start + index, p_column)
            p_best = tl.maximum(p_best, top)
            top, index = tl.max(tl.where(inside, q, -float("inf")), axis=0, return_indices=True)
            q_column = tl.where(top > q_best, start + index, q_column)
            q_best = tl.maximum(q_best, top)
        slopes = tl.where(alone & (lanes == 0), whole * student_used, slopes)
        kept = lanes < end - first
        row = tl.load(student_order_ptr + first + lanes, mask=kept, other=0)
        tl.store(row_slope_ptr + row, slopes, mask=kept)
        tl.store(value_ptr + program, value)
        tl.store(best_ptr + program, p_best)
        tl.store(best_ptr + tl.num_programs(0) + program, q_best)
        tl.store(column_ptr + program, (column_start + p_column).to(tl.int64))
        tl.store(column_ptr + tl.num_programs(0) + program, (column_start + q_column).to(tl.int64))


@triton.jit
def gradient_kernel(
    student_ptr,
    gradient_ptr,
    student_order_ptr,
    student_offsets_ptr,
    student_peak_ptr,
    student_log_sum_ptr,
    student_used_ptr,
    teacher_ptr,
    teacher_order_ptr,
    teacher_offsets_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_used_ptr,
    pairs_ptr,
    moved_ptr,
    base_ptr,
    shift_ptr,
    centre_ptr,
    scale_ptr,
    first_chunk,
    student_stride,
    gradient_stride,
    teacher_stride,
    moved_stride,
    width,
    valid_width,
    temperature,
    mixture,
    DIRECTION: tl.constexpr,
    MOVED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: ``q_i (g_c - centre_i) scale_c`` in its rows, 0 in padding.

    ``g_c`` is that of the matched columns, and ``base_c`` elsewhere.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = first_chunk + program
    begin = tl.load(student_offsets_ptr + chunk)
    end = tl.load(student_offsets_ptr + chunk + 1)
    teacher_begin = tl.load(teacher_offsets_ptr + chunk)
    teacher_end = tl.load(teacher_offsets_ptr + chunk + 1)
    student_used = tl.load(student_used_ptr + chunk)
    teacher_used = tl.load(teacher_used_ptr + chunk)
    base = tl.load(base_ptr + chunk)
    shift = tl.load(shift_ptr + chunk)
    scale = tl.load(scale_ptr + chunk)
    moved_row_ptr = moved_ptr
    if MOVED:
        moved_row_ptr = moved_ptr + program * moved_stride
    # Chunks without rows have nothing to write.
    for start in range(0, tl.where(end > begin, width, 0), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        held = columns < width
        valid = columns < valid_width
        p, q, common = _both_sides(
            student_ptr,
            student_order_ptr,
            student_peak_ptr,
            student_log_sum_ptr,
            student_stride,
            begin,
            end,
            student_used,
            teacher_ptr,
            teacher_order_ptr,
            teacher_peak_ptr,
            teacher_log_sum_ptr,
            teacher_stride,
            teacher_begin,
            teacher_end,
            teacher_used,
            pairs_ptr,
            moved_row_ptr,
            columns,
            held,
            valid,
            temperature,
            MOVED,
            HAS_TEMPERATURE,
            BLOCK,
        )
        _, slope = _terms(p, q, mixture, DIRECTION)
        slope = tl.where(common, slope / student_used - shift, base)
        for place in range(begin, end):
            row = tl.load(student_order_ptr + place).to(tl.int64)
            own = row_probabilities(
                student_ptr,
                row,
                student_stride,
                student_peak_ptr,
                student_log_sum_ptr,
                columns,
                held,
                valid,
                temperature,
                HAS_TEMPERATURE,
            )
            out = own * (slope - tl.load(centre_ptr + row)) * scale
            out = tl.where(valid, out, 0.0)
            out = tl.where(scale == 0.0, 0.0, out)
            # The gradient may be the logits, which other threads may still be reading.
            tl.debug_barrier()
            place_of = gradient_ptr + row * gradient_stride + columns
            tl.store(place_of, out.to(gradient_ptr.dtype.element_ty), mask=held)

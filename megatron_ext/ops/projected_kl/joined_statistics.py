"""Statistics of both models' rows that ``single_kernel`` takes before it reads the rows again.

Units are chunks, and more where rows of no chunk are many; each has some of those. A unit's rows
are read by ``PARTS`` programs, every one its blocks of columns; the last one merges what they have
found and computes from it what ``statistics.py`` does. T rows, C chunks.
"""

import triton
import triton.language as tl

from megatron_ext.ops.softmax_kernels import SAFE_MASS, members_alone, part_statistics
from megatron_ext.ops.triton_math import FLOOR, LOG2_E

EPS: tl.constexpr = tl.constexpr(1.1920928955078125e-07)
"""Of fp32: below this share of mapped mass a chunk is scaled up."""


@triton.jit
def rows_of_unit(unit, units, chunk_ptr, chunks, rows):
    """First place of the chunk's rows, their number, and with those of no chunk."""
    is_chunk = unit < chunks
    begin = tl.load(chunk_ptr + unit, mask=is_chunk, other=0)
    count = tl.load(chunk_ptr + unit + 1, mask=is_chunk, other=0) - begin
    outside = rows - tl.load(chunk_ptr + chunks) - unit
    return begin, count, count + tl.where(outside > 0, (outside + units - 1) // units, 0)


@triton.jit
def row_of_unit(step, unit, units, begin, count, order_ptr, chunk_ptr, chunks):
    """The chunk's rows, then those of no chunk."""
    outside = tl.load(chunk_ptr + chunks) + unit + (step - count) * units
    return tl.load(order_ptr + tl.where(step < count, begin + step, outside))


@triton.jit
def store_part(
    row,
    rows,
    part,
    start_of_row,
    members_ptr,
    width,
    held_width,
    temperature,
    parts_ptr,
    columns_ptr,
    HAS_PLAIN: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part's peak, sum, members' sum [3, T, PARTS] and column [T, PARTS].

    ``HAS_PLAIN``: two more, the peak and sum without the temperature.
    """
    place = row.to(tl.int64) * PARTS + part
    plane = rows.to(tl.int64) * PARTS
    best, total, members, column = part_statistics(
        start_of_row, members_ptr, part, width, held_width, temperature, True, HAS_TEMPERATURE,
        PARTS, 16, BLOCK,
    )  # fmt: skip
    tl.store(parts_ptr + place, best)
    tl.store(parts_ptr + plane + place, total)
    tl.store(parts_ptr + 2 * plane + place, members)
    tl.store(columns_ptr + place, column)
    if HAS_PLAIN:
        best, total, members, column = part_statistics(
            start_of_row, None, part, width, held_width, 1.0, False, False, PARTS, 8, BLOCK
        )
        tl.store(parts_ptr + 3 * plane + place, best)
        tl.store(parts_ptr + 4 * plane + place, total)


@triton.jit
def unit_statistics(
    unit,
    units,
    part,
    student_ptr,
    student_order_ptr,
    student_chunk_ptr,
    student_stride,
    student_rows,
    student_members_ptr,
    width,
    padded_width,
    teacher_ptr,
    teacher_order_ptr,
    teacher_chunk_ptr,
    teacher_stride,
    teacher_rows,
    teacher_members_ptr,
    teacher_width,
    padded_teacher_width,
    temperature,
    chunks,
    parts_ptr,
    part_columns_ptr,
    HAS_PLAIN: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of a part of every row of a unit; the teacher's of no chunk have none."""
    begin, count, steps = rows_of_unit(unit, units, student_chunk_ptr, chunks, student_rows)
    for step in range(0, steps):
        row = row_of_unit(
            step, unit, units, begin, count, student_order_ptr, student_chunk_ptr, chunks
        )
        start = student_ptr + row.to(tl.int64) * student_stride
        store_part(
            row, student_rows, part, start, student_members_ptr, width, padded_width, temperature,
            parts_ptr, part_columns_ptr, HAS_PLAIN, HAS_TEMPERATURE, PARTS, BLOCK,
        )  # fmt: skip
    parts_ptr += 5 * student_rows.to(tl.int64) * PARTS
    part_columns_ptr += student_rows.to(tl.int64) * PARTS
    begin, count, steps = rows_of_unit(unit, units, teacher_chunk_ptr, chunks, teacher_rows)
    for step in range(0, count):
        row = tl.load(teacher_order_ptr + begin + step)
        start = teacher_ptr + row.to(tl.int64) * teacher_stride
        store_part(
            row, teacher_rows, part, start, teacher_members_ptr, teacher_width,
            padded_teacher_width, temperature, parts_ptr, part_columns_ptr, False,
            HAS_TEMPERATURE, PARTS, BLOCK,
        )  # fmt: skip


@triton.jit
def merged_peak(parts_ptr, places):
    """Peak of a row, those of its parts, and factors of sums over those."""
    peaks = tl.load(parts_ptr + places)
    best = tl.max(peaks, axis=0)
    return best, peaks, tl.exp2((peaks - best) * LOG2_E)


@triton.jit
def merged_row(
    row,
    rows,
    start_of_row,
    members_ptr,
    width,
    temperature,
    parts_ptr,
    columns_ptr,
    HAS_TEMPERATURE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Peak and logarithm of the sum of a row and of its members, and its column."""
    plane = rows.to(tl.int64) * PARTS
    places = row.to(tl.int64) * PARTS + tl.arange(0, PARTS)
    best, peaks, weights = merged_peak(parts_ptr, places)
    total = tl.sum(tl.load(parts_ptr + plane + places) * weights, axis=0)
    members = tl.sum(tl.load(parts_ptr + 2 * plane + places) * weights, axis=0)
    columns = tl.load(columns_ptr + places)
    column = tl.min(tl.where(peaks == best, columns, width), axis=0)
    column = tl.where(column < width, column, 0)
    member_peak = best
    if members < total * SAFE_MASS:
        member_peak, members = members_alone(
            start_of_row, members_ptr, width, temperature, HAS_TEMPERATURE, BLOCK
        )
    best = tl.where(total == 0.0, 0.0, best)
    member_peak = tl.where(members == 0.0, 0.0, member_peak)
    return best, tl.log(total), member_peak, tl.log(members), column


@triton.jit
def unit_numbers(
    unit,
    units,
    student_ptr,
    student_order_ptr,
    student_chunk_ptr,
    student_stride,
    student_lse_ptr,
    student_rows,
    student_members_ptr,
    width,
    teacher_ptr,
    teacher_order_ptr,
    teacher_chunk_ptr,
    teacher_stride,
    teacher_lse_ptr,
    teacher_rows,
    teacher_members_ptr,
    teacher_width,
    temperature,
    chunks,
    carried_lse_ptr,
    plain_lse_ptr,
    student_column_ptr,
    teacher_column_ptr,
    is_scaled_ptr,
    is_compared_ptr,
    mass_ptr,
    grad_scale_ptr,
    left_out_ptr,
    parts_ptr,
    part_columns_ptr,
    HAS_PLAIN: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalisers of a unit's rows [2, T] and columns [T], and numbers of its chunk [C].

    ``grad_scale`` holds the chunk's weight before, and 0 after where it is not compared.
    """
    begin, count, steps = rows_of_unit(unit, units, student_chunk_ptr, chunks, student_rows)
    largest = tl.full((), -float("inf"), tl.float32)
    has_nan = count < 0
    for step in range(0, steps):
        row = row_of_unit(
            step, unit, units, begin, count, student_order_ptr, student_chunk_ptr, chunks
        )
        start = student_ptr + row.to(tl.int64) * student_stride
        peak, log_sum, inside_peak, inside_sum, column = merged_row(
            row, student_rows, start, student_members_ptr, width, temperature, parts_ptr,
            part_columns_ptr, HAS_TEMPERATURE, PARTS, BLOCK,
        )  # fmt: skip
        tl.store(student_lse_ptr + row, peak)
        tl.store(student_lse_ptr + student_rows + row, log_sum)
        tl.store(student_column_ptr + row, column)
        # Those of the members for now.
        tl.store(carried_lse_ptr + row, inside_peak)
        tl.store(carried_lse_ptr + student_rows + row, inside_sum)
        if HAS_PLAIN:
            plane = student_rows.to(tl.int64) * PARTS
            places = row.to(tl.int64) * PARTS + tl.arange(0, PARTS)
            plain_peak, _, weights = merged_peak(parts_ptr + 3 * plane, places)
            plain_sum = tl.sum(tl.load(parts_ptr + 4 * plane + places) * weights, axis=0)
            tl.store(plain_lse_ptr + row, tl.where(plain_sum == 0.0, 0.0, plain_peak))
            tl.store(plain_lse_ptr + student_rows + row, tl.log(plain_sum))
        if step < count:
            share = inside_peak - peak + inside_sum - log_sum
            has_nan = has_nan | (share != share)
            largest = tl.where(share > largest, share, largest)
    tl.debug_barrier()
    is_scaled = (largest > -float("inf")) & (tl.exp(largest) < EPS) & (not has_nan)
    mass = tl.full((), 0.0, tl.float32)
    for step in range(0, steps):
        row = row_of_unit(
            step, unit, units, begin, count, student_order_ptr, student_chunk_ptr, chunks
        )
        peak = tl.load(student_lse_ptr + row)
        log_sum = tl.load(student_lse_ptr + student_rows + row)
        inside_peak = tl.load(carried_lse_ptr + row)
        inside_sum = tl.load(carried_lse_ptr + student_rows + row)
        share = inside_peak - peak + inside_sum - log_sum
        is_moved = is_scaled & (share > -float("inf")) & (step < count)
        peak = tl.where(is_moved, inside_peak, peak)
        log_sum = tl.where(is_moved, inside_sum - (share - largest), log_sum)
        tl.debug_barrier()
        tl.store(carried_lse_ptr + row, peak)
        tl.store(carried_lse_ptr + student_rows + row, log_sum)
        if step < count:
            mass += tl.exp(inside_peak - peak + inside_sum - log_sum)
    mass = mass / tl.maximum(count, 1)
    # A comparison that NaN fails keeps NaN.
    mass = tl.where(mass < FLOOR, FLOOR, mass)
    is_compared = (count > 0) & ((largest > -float("inf")) | has_nan)

    parts_ptr += 5 * student_rows.to(tl.int64) * PARTS
    part_columns_ptr += student_rows.to(tl.int64) * PARTS
    begin, count, steps = rows_of_unit(unit, units, teacher_chunk_ptr, chunks, teacher_rows)
    is_compared = is_compared & (count > 0)
    left_out = tl.full((), 0.0, tl.float32)
    for step in range(0, count):
        row = tl.load(teacher_order_ptr + begin + step)
        start = teacher_ptr + row.to(tl.int64) * teacher_stride
        peak, log_sum, reached_peak, reached_sum, column = merged_row(
            row, teacher_rows, start, teacher_members_ptr, teacher_width, temperature, parts_ptr,
            part_columns_ptr, HAS_TEMPERATURE, PARTS, BLOCK,
        )  # fmt: skip
        tl.store(teacher_lse_ptr + row, reached_peak)
        tl.store(teacher_lse_ptr + teacher_rows + row, reached_sum)
        tl.store(teacher_column_ptr + row, column)
        share = reached_peak - peak + reached_sum - log_sum
        missing = one_less_exp(share)
        left_out += missing
        is_compared = is_compared & ((reached_sum > -float("inf")) | (missing != 1.0))
    if unit < chunks:
        tl.store(is_scaled_ptr + unit, is_scaled)
        tl.store(is_compared_ptr + unit, is_compared)
        tl.store(mass_ptr + unit, mass)
        weight = tl.load(grad_scale_ptr + unit)
        tl.debug_barrier()
        tl.store(grad_scale_ptr + unit, tl.where(is_compared, weight, 0.0))
        tl.store(left_out_ptr + unit, left_out)


@triton.jit
def one_less_exp(share):
    """``1 - exp(share)``, of a small share by the first terms of its series."""
    series = 1.0 + share / 2.0 * (1.0 + share / 3.0 * (1.0 + share / 4.0 * (1.0 + share / 5.0)))
    return tl.where(share > -0.06, -share * series, 1.0 - tl.exp(share))

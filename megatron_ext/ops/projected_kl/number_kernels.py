"""Triton kernels for numbers of rows, chunks and labels, which torch would take a hundred small
operations for. T rows, C chunks."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.projected_kl.single_kernel import is_single
from megatron_ext.ops.projected_kl.triton_kernels import best_of
from megatron_ext.ops.triton_math import FLOOR, lost_share

EPSILON = tl.constexpr(1.1920928955078125e-07)
"""Of fp32: a share below it is a rounding error beside the rest."""


@triton.jit
def log_share(sums_ptr, logs_ptr, part, whole):
    """Logarithm of the share that the sum ``part`` has in ``whole``."""
    peaks = tl.load(sums_ptr + part) - tl.load(sums_ptr + whole)
    return peaks + tl.load(logs_ptr + part) - tl.load(logs_ptr + whole)


@kernel(do_not_specialize=["student_rows", "teacher_rows", "chunks"])
def chunk_numbers_kernel(
    peak_ptr,
    log_sum_ptr,
    student_order_ptr,
    student_chunk_ptr,
    student_rows,
    teacher_order_ptr,
    teacher_chunk_ptr,
    teacher_rows,
    weight_ptr,
    weight,
    chunks,
    student_lse_ptr,
    carried_lse_ptr,
    teacher_lse_ptr,
    is_scaled_ptr,
    mass_ptr,
    left_out_ptr,
    compared_ptr,
    grad_scale_ptr,
    BLOCK: tl.constexpr,
):
    """Numbers of BLOCK chunks from the merged sums of their rows; README, equations 12 to 14.

    ``peak`` and ``log_sum`` hold [Ts] of all of the student's columns, [Ts] of the mapped ones,
    [Tt] of all of the teacher's and [Tt] of the reachable ones. Log-sum-exps, [2, Ts] of the
    student's over all columns and as they are carried, and [2, Tt] of the teacher's over the
    reachable ones, are written for rows of chunks alone. Chunks have the ``weight`` of all where
    they have none of their own.
    """
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = chunk < chunks
    begin = tl.load(student_chunk_ptr + chunk, mask=exists, other=0)
    count = tl.load(student_chunk_ptr + chunk + 1, mask=exists, other=0) - begin
    most = tl.max(count, axis=0)

    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    is_nan = tl.zeros((BLOCK,), tl.int1)
    for step in range(0, most):
        inside = step < count
        row = tl.load(student_order_ptr + begin + step, mask=inside, other=0)
        share = log_share(peak_ptr, log_sum_ptr, student_rows + row, row)
        largest = tl.where(inside & (share > largest), share, largest)
        is_nan = is_nan | (inside & (share != share))
    is_empty = (largest == -float("inf")) & (is_nan == 0)
    is_scaled = (largest > -float("inf")) & (tl.exp(largest) < EPSILON) & (is_nan == 0)

    mass = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, most):
        inside = step < count
        row = tl.load(student_order_ptr + begin + step, mask=inside, other=0)
        peak = tl.load(peak_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        mapped_peak = tl.load(peak_ptr + student_rows + row)
        mapped_log = tl.load(log_sum_ptr + student_rows + row)
        tl.store(student_lse_ptr + row, peak, mask=inside)
        tl.store(student_lse_ptr + student_rows + row, log_sum, mask=inside)
        share = mapped_peak - peak + mapped_log - log_sum
        takes = is_scaled & (share > -float("inf"))
        peak = tl.where(takes, mapped_peak, peak)
        log_sum = tl.where(takes, mapped_log - (share - largest), log_sum)
        tl.store(carried_lse_ptr + row, peak, mask=inside)
        tl.store(carried_lse_ptr + student_rows + row, log_sum, mask=inside)
        mass += tl.where(inside, tl.exp(mapped_peak - peak + mapped_log - log_sum), 0.0)
    mass = mass / tl.maximum(count, 1)
    # A comparison that NaN fails keeps NaN.
    tl.store(mass_ptr + chunk, tl.where(mass < FLOOR, FLOOR, mass), mask=exists)
    tl.store(is_scaled_ptr + chunk, is_scaled, mask=exists)

    compared = (count > 0) & (is_empty == 0)
    begin = tl.load(teacher_chunk_ptr + chunk, mask=exists, other=0)
    count = tl.load(teacher_chunk_ptr + chunk + 1, mask=exists, other=0) - begin
    compared = compared & (count > 0)
    whole, reached = 2 * student_rows, 2 * student_rows + teacher_rows
    left_out = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.max(count, axis=0)):
        inside = step < count
        row = tl.load(teacher_order_ptr + begin + step, mask=inside, other=0)
        lost = lost_share(log_share(peak_ptr, log_sum_ptr, reached + row, whole + row))
        left_out += tl.where(inside, lost, 0.0)
        # A row that masks every reachable column gives no distribution over them.
        log_sum = tl.load(log_sum_ptr + reached + row)
        compared = compared & (((log_sum == -float("inf")) & (lost == 1) & inside) == 0)
        tl.store(teacher_lse_ptr + row, tl.load(peak_ptr + reached + row), mask=inside)
        tl.store(teacher_lse_ptr + teacher_rows + row, log_sum, mask=inside)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + chunk, mask=exists, other=0.0)
    tl.store(left_out_ptr + chunk, left_out, mask=exists)
    tl.store(compared_ptr + chunk, compared, mask=exists)
    tl.store(grad_scale_ptr + chunk, tl.where(compared, weight, 0.0), mask=exists)


@kernel(do_not_specialize=["start", "rows", "first_sum"])
def label_numbers_kernel(
    logits_ptr,
    row_stride,
    peak_ptr,
    log_sum_ptr,
    first_sum,
    label_ptr,
    weight_ptr,
    weight,
    start,
    width,
    vocab_size,
    rows,
    plain_lse_ptr,
    column_ptr,
    label_weight_ptr,
    loss_ptr,
    BLOCK: tl.constexpr,
):
    """Column, weight and loss of BLOCK labels, -1, 0 and 0 where this rank has none; and the
    log-sum-exp of their rows at temperature 1, [2, T], of sums from ``first_sum`` on.

    ``start`` is the rank's first column. A label beyond the vocabulary has a loss of NaN. Labels
    have the ``weight`` of all where they have none of their own.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    label = tl.load(label_ptr + row, mask=exists, other=-1)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row, mask=exists, other=0.0)
    column = label - start
    is_here = (column >= 0) & (column < width) & exists
    place = row.to(tl.int64) * row_stride + column
    picked = tl.load(logits_ptr + place, mask=is_here, other=0.0).to(tl.float32)
    tl.store(column_ptr + row, tl.where(is_here, column, -1), mask=exists)
    tl.store(label_weight_ptr + row, tl.where(label < 0, 0.0, weight), mask=exists)
    peak = tl.load(peak_ptr + first_sum + row, mask=exists, other=0.0)
    log_sum = tl.load(log_sum_ptr + first_sum + row, mask=exists, other=0.0)
    tl.store(plain_lse_ptr + row, peak, mask=exists)
    tl.store(plain_lse_ptr + rows + row, log_sum, mask=exists)
    loss = tl.where(is_here, peak - picked + log_sum, 0.0)
    tl.store(loss_ptr + row, tl.where(label >= vocab_size, float("nan"), loss), mask=exists)


@kernel(do_not_specialize=["chunks", "slot_blocks", "blocks", "start"])
def chunk_values_kernel(
    partial_ptr,
    best_ptr,
    slot_blocks,
    blocks,
    single_ptr,
    single_best_ptr,
    chunk_ptr,
    is_scaled_ptr,
    grad_scale_ptr,
    compared_ptr,
    scale,
    start,
    chunks,
    sums_ptr,
    largest_ptr,
    column_ptr,
    HAS_SINGLES: tl.constexpr,
    HAS_DIAGNOSTICS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a chunk's terms over the blocks of columns that have them, and choose their largest.

    ``partial`` [4, C, blocks] and ``best`` [2, C, blocks] are of one source, ``single`` with
    ``PARTS`` blocks of the other: chunks that are ``is_single`` have theirs from it, and of the
    first source the ``slot_blocks``; all others have all of the first alone. Writes ``scale D``,
    the entropy, of diagnostics, and 0 [3, C], 0 where nothing is compared, and for diagnostics the
    largest P and Q~ [2, C] and their columns over all ranks, of which no two are equal where
    nothing is compared.
    """
    chunk = tl.program_id(0).to(tl.int64)
    compared = tl.load(compared_ptr + chunk)
    count, parts = blocks, 0
    if HAS_SINGLES:
        rows = tl.load(chunk_ptr + chunk + 1) - tl.load(chunk_ptr + chunk)
        grad_scale = tl.load(grad_scale_ptr + chunk)
        if is_single(rows, tl.load(is_scaled_ptr + chunk), grad_scale):
            count, parts = slot_blocks, PARTS
    plane, singles = chunks.to(tl.int64) * blocks, chunks.to(tl.int64) * PARTS
    start_of, single_of = chunk * blocks, chunk * PARTS
    tl.store(sums_ptr + 2 * chunks + chunk, 0.0)
    for number in tl.static_range(2):
        total = 0.0
        if HAS_DIAGNOSTICS | (number == 0):
            total = sum_of(partial_ptr + number * plane + start_of, count, BLOCK)
            if HAS_SINGLES:
                total += sum_of(single_ptr + number * singles + single_of, parts, PARTS)
        if number == 0:
            total = total * scale
        tl.store(sums_ptr + number * chunks + chunk, tl.where(compared, total, 0.0))
    if HAS_DIAGNOSTICS:
        for number in tl.static_range(2):
            best = tl.full((), -float("inf"), tl.float32)
            column = tl.full((), 2147483647, tl.int32)
            values = partial_ptr + (2 + number) * plane + start_of
            columns = best_ptr + number * plane + start_of
            best, column = largest_of(best, column, values, columns, count, BLOCK)
            if HAS_SINGLES:
                values = single_ptr + (2 + number) * singles + single_of
                columns = single_best_ptr + number * singles + single_of
                best, column = largest_of(best, column, values, columns, parts, PARTS)
            tl.store(largest_ptr + number * chunks + chunk, best)
            column_of_all = tl.where(compared, column.to(tl.int64) + start, -1 - number)
            tl.store(column_ptr + number * chunks + chunk, column_of_all)


@triton.jit
def sum_of(values_ptr, count, BLOCK: tl.constexpr):
    """Sum of ``count`` values."""
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(values_ptr + place, mask=place < count, other=0.0), axis=0)
    return total


@triton.jit
def largest_of(best, column, values_ptr, columns_ptr, count, BLOCK: tl.constexpr):
    """``best`` or the largest of ``count`` values, and the first column of those that reach it."""
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + place, mask=place < count, other=-float("inf"))
        columns = tl.load(columns_ptr + place, mask=place < count, other=2147483647)
        top, lowest = best_of(values, columns)
        lowest = tl.where(top == best, tl.minimum(lowest, column), lowest)
        column = tl.where(top < best, column, lowest)
        best = tl.maximum(top, best)
    return best, column

"""Triton kernel of a row's peak, sum and argmax, over all its columns and over a set of them."""

import triton
import triton.language as tl

from megatron_ext.ops.triton_math import add_exponentials, finite_peak, row_values, scaled


@triton.jit
def row_statistics_kernel(
    logits_ptr,
    members_ptr,
    read_ptr,
    peak_ptr,
    total_ptr,
    column_ptr,
    row_stride,
    width,
    held_width,
    rows,
    temperature,
    HAS_MEMBERS: tl.constexpr,
    HAS_READ: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row, over all columns and over the members.

    ``peak`` and ``total`` are [2, T], ``column`` [T]. Columns from ``width`` to ``held_width`` are
    padding in memory and are ignored (``row_values``).
    """
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits_ptr + row * row_stride
    best = -float("inf")
    column = 0
    peak = -float("inf")
    total = 0.0
    member_peak = -float("inf")
    member_total = 0.0
    end = width
    if HAS_READ:
        end = tl.where(tl.load(read_ptr + row) != 0, width, 0)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        held = columns < held_width
        loaded = row_values(start_of_row, columns, held, inside)
        values = scaled(loaded, temperature, HAS_TEMPERATURE)
        block_best, block_column = tl.max(values, axis=0, return_indices=True)
        column = tl.where(block_best > best, start + block_column, column)
        best = tl.maximum(best, block_best)
        peak, total = add_exponentials(peak, total, values)
        if HAS_MEMBERS:
            is_member = tl.load(members_ptr + columns, mask=held, other=0) != 0
            chosen = tl.where(is_member, values, -float("inf"))
            member_peak, member_total = add_exponentials(member_peak, member_total, chosen)
    tl.store(peak_ptr + row, finite_peak(peak))
    tl.store(total_ptr + row, total)
    tl.store(column_ptr + row, column)
    if HAS_MEMBERS:
        tl.store(peak_ptr + rows + row, finite_peak(member_peak))
        tl.store(total_ptr + rows + row, member_total)

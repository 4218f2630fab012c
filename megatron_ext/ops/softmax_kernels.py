"""Triton kernel of a row's peak, sum and argmax, over all its columns and over a set of them."""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.triton_math import (
    LOG2_E,
    LOWEST,
    first_column,
    lane_sums,
    merged_lanes,
    scaled,
)

SAFE_MASS: tl.constexpr = tl.constexpr(1e-17)
"""Share of a row's sum from which on the members' sum has all its digits (40 nats)."""


@triton.jit
def members_alone(
    start_of_row, members_ptr, end, temperature, HAS_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr
):
    """Peak and sum of the members where they are too small beside the other columns."""
    best = tl.full((BLOCK,), LOWEST, tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        chosen = tl.load(members_ptr + columns, mask=columns < end, other=0) != 0
        loaded = tl.load(start_of_row + columns, mask=chosen, other=-float("inf"))
        best = tl.maximum(best, scaled(loaded, temperature, HAS_TEMPERATURE))
    peak = tl.max(best, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        chosen = tl.load(members_ptr + columns, mask=columns < end, other=0) != 0
        loaded = tl.load(start_of_row + columns, mask=chosen, other=-float("inf"))
        values = scaled(loaded, temperature, HAS_TEMPERATURE)
        total += tl.exp2((values - peak) * LOG2_E)
    return peak, tl.sum(total, axis=0)


@triton.jit
def statistics_of_row(
    start_of_row,
    members_ptr,
    end,
    held_width,
    temperature,
    HAS_MEMBERS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Peak, sum, the members' sum over the same peak, and first column of the peak.

    Of a row's columns before ``end``. The peak is ``LOWEST`` where no column is above it. Columns
    from ``end`` to ``held_width`` are padding in memory and are ignored (``row_values``). Each lane
    of ``K`` columns, which a thread loads at once, has a peak and sums of its own until the row has
    ended: no thread waits for another.
    """
    LANES: tl.constexpr = BLOCK // K
    places = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
    peak = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    member_total = tl.zeros((LANES,), tl.float32)
    first = tl.zeros((LANES,), tl.int32)
    whole = end // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=3):
        values = scaled(tl.load(start_of_row + start + places), temperature, HAS_TEMPERATURE)
        is_member = True
        if HAS_MEMBERS:
            is_member = tl.load(members_ptr + start + places) != 0
        before = peak
        peak, total, member_total = lane_sums(
            peak, total, member_total, values, is_member, HAS_MEMBERS
        )
        first = tl.where(peak > before, start, first)
    if whole < end:
        columns = whole + places
        held = columns < held_width
        loaded = tl.load(start_of_row + columns, mask=held, other=-float("inf"))
        values = scaled(loaded, temperature, HAS_TEMPERATURE)
        values = tl.where(columns < end, values, -float("inf"))
        is_member = True
        if HAS_MEMBERS:
            is_member = tl.load(members_ptr + columns, mask=held, other=0) != 0
        before = peak
        peak, total, member_total = lane_sums(
            peak, total, member_total, values, is_member, HAS_MEMBERS
        )
        first = tl.where(peak > before, whole, first)
    best, row_total, members = merged_lanes(peak, total, member_total)
    column = first_column(
        start_of_row, peak, first, best, end, temperature, HAS_TEMPERATURE, K, LANES
    )
    return best, row_total, members, column


# Sums of several models are written to one memory, at any place in it.
@kernel(do_not_specialize=["rows"], do_not_specialize_on_alignment=["peak_ptr", "total_ptr"])
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

    ``peak`` and ``total`` are [2, T], ``column`` [T].
    """
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits_ptr + row * row_stride
    end = width
    if HAS_READ:
        end = tl.where(tl.load(read_ptr + row) != 0, width, 0)
    best, row_total, members, column = statistics_of_row(
        start_of_row, members_ptr, end, held_width, temperature, HAS_MEMBERS, HAS_TEMPERATURE,
        16 if HAS_MEMBERS else 8, BLOCK,
    )  # fmt: skip
    is_empty = row_total == 0.0
    tl.store(peak_ptr + row, tl.where(is_empty, 0.0, best))
    tl.store(total_ptr + row, row_total)
    tl.store(column_ptr + row, column)
    if HAS_MEMBERS:
        member_peak = best
        if members < row_total * SAFE_MASS:
            member_peak, members = members_alone(
                start_of_row, members_ptr, end, temperature, HAS_TEMPERATURE, BLOCK
            )
        tl.store(peak_ptr + rows + row, tl.where(members == 0.0, 0.0, member_peak))
        tl.store(total_ptr + rows + row, members)

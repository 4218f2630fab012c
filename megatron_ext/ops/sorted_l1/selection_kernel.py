"""Triton kernel that finds the largest mean probabilities of a chunk without sorting."""

import triton
import triton.language as tl

from megatron_ext.ops.sorted_l1.key_bins import chosen_bin, count_keys, key_in_bin, keys_of
from megatron_ext.ops.sorted_l1.selection_blocks import (
    K,
    hits_of_lanes,
    lowest_keys,
    mean_block,
    single_block,
    store_hits,
)
from megatron_ext.ops.triton_math import LOG2_E

WIDE: tl.constexpr = tl.constexpr(24)
"""Logarithm of the width of the first bins: two octaves."""

NARROW: tl.constexpr = tl.constexpr(21)
"""That of bins among which a sample decides: a quarter of an octave."""

CLUSTER: tl.constexpr = tl.constexpr(32)
"""Neighbouring columns of a sample: 64 bytes of bf16, which memory loads at once."""

COARSE: tl.constexpr = tl.constexpr(8)
"""How many times fewer columns are sampled to find where to look closer."""

NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Column beyond all."""


@triton.jit
def _counters(
    rows,
    single,
    excluded_ptr,
    widths,
    bins,
    stride,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``count_keys`` of one of ``stride`` clusters of columns each, of all where it is 1."""
    LANES: tl.constexpr = BLOCK // (2 * K)
    HALF: tl.constexpr = LANES * K
    low, span = bins
    origin, width, _, whole = widths
    first = tl.zeros((LANES,), tl.int64)
    second = tl.zeros((LANES,), tl.int64)
    third = tl.zeros((LANES,), tl.int64)
    fourth = tl.zeros((LANES,), tl.int64)
    # The cluster in the middle.
    lanes = tl.arange(0, LANES) * K
    block = (lanes // CLUSTER * stride + stride // 2) * CLUSTER + lanes % CLUSTER
    ahead = origin + (whole - origin) // (stride * BLOCK) * (stride * BLOCK)
    for start in tl.range(origin, ahead, stride * BLOCK, num_stages=3):
        for half in tl.static_range(2):
            columns = single_block(
                single,
                excluded_ptr,
                start + stride * (half * HALF),
                block,
                temperature,
                HAS_EXCLUDED,
                HAS_TEMPERATURE,
            )
            first, second, third, fourth = count_keys(
                (first, second, third, fourth), columns, low, span
            )
    for start in tl.range(ahead, width, stride * HALF):
        columns = mean_block(
            rows, excluded_ptr, start, block, widths, temperature, HAS_EXCLUDED, HAS_TEMPERATURE
        )
        first, second, third, fourth = count_keys(
            (first, second, third, fourth), columns, low, span
        )
    return first, second, third, fourth


@triton.jit
def _cut(
    rows,
    excluded_ptr,
    widths,
    low,
    edge,
    missing,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Column, the first of a lane, before which ``missing`` keys or few more are from ``low`` on.

    Keys from ``edge`` on are not among them.
    """
    lanes = tl.arange(0, LANES) * K
    start, width, _, _ = widths
    found = 0
    cut = NOWHERE
    while (start < width) & (found < missing):
        probabilities = mean_block(
            rows, excluded_ptr, start, lanes, widths, temperature, HAS_EXCLUDED, HAS_TEMPERATURE
        )
        ties = tl.zeros((LANES,), tl.int32)
        for k in tl.static_range(K):
            keys = keys_of(probabilities[k])
            ties += ((keys >= low) & (keys < edge)).to(tl.int32)
        until = found + tl.cumsum(ties, axis=0)
        ends = start + lanes + K
        cut = tl.min(tl.where(until >= missing, ends, NOWHERE), axis=0)
        found += tl.sum(ties, axis=0)
        start += LANES * K
    return cut


@triton.jit
def _store_largest(
    rows,
    single,
    excluded_ptr,
    widths,
    threshold,
    candidates,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store what reaches the threshold in the order of columns; its number, the others' sum."""
    LANES: tl.constexpr = BLOCK // (2 * K)
    HALF: tl.constexpr = LANES * K
    origin, width, _, whole = widths
    lanes = tl.arange(0, LANES) * K
    stored = 0
    rest = tl.zeros((LANES,), tl.float32)
    for start in tl.range(origin, whole, BLOCK, num_stages=3):
        # Two blocks with one prefix sum: each has less than 2^16 columns.
        column = start + lanes
        first = single_block(
            single, excluded_ptr, start, lanes, temperature, HAS_EXCLUDED, HAS_TEMPERATURE
        )
        second = single_block(
            single, excluded_ptr, start + HALF, lanes, temperature, HAS_EXCLUDED, HAS_TEMPERATURE
        )
        low = lowest_keys(column, threshold)
        low_second = lowest_keys(column + HALF, threshold)
        hits = hits_of_lanes(first, low)
        hits += hits_of_lanes(second, low_second) << 16
        until = tl.cumsum(hits, axis=0)
        total = tl.sum(hits, axis=0)
        place = stored + ((until - hits) & 0xFFFF)
        ends = stored + (until & 0xFFFF)
        rest = store_hits(candidates, first, place, ends, column, low, rest)
        stored += total & 0xFFFF
        place = stored + ((until - hits) >> 16)
        ends = stored + (until >> 16)
        column += HALF
        rest = store_hits(candidates, second, place, ends, column, low_second, rest)
        stored += total >> 16
    for start in range(whole, width, HALF):
        column = start + lanes
        both = mean_block(
            rows, excluded_ptr, start, lanes, widths, temperature, HAS_EXCLUDED, HAS_TEMPERATURE
        )
        low = lowest_keys(column, threshold)
        hits = hits_of_lanes(both, low)
        until = stored + tl.cumsum(hits, axis=0)
        rest = store_hits(candidates, both, until - hits, until, column, low, rest)
        stored += tl.sum(hits, axis=0)
    return stored, tl.sum(rest, axis=0)


@triton.jit(
    do_not_specialize=[
        "first_chunk", "first_column", "width", "places", "capacity", "sample_stride",
    ]
)  # fmt: skip
def select_kernel(
    logits_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    excluded_ptr,
    values_ptr,
    columns_ptr,
    rest_ptr,
    first_chunk,
    row_stride,
    first_column,
    width,
    padded_width,
    places,
    capacity,
    sample_stride,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: ``places`` to ``capacity`` of its largest mean probabilities.

    ``values`` [C', capacity] are -1 behind them. Columns before ``first_column`` are excluded:
    blocks of them are not read. A sample suggests a lowest key, and all that reach it are written.
    Where they are fewer than ``places`` or more than ``capacity``, all columns are counted in 16
    bins of keys, and again in the bin that holds the ``places``-th largest, until the keys from its
    lower end on fit into ``capacity``, or are all equal; then they are written once more. The whole
    blocks of a single row are loaded ahead of time.
    """
    LANES: tl.constexpr = BLOCK // (2 * K)
    program = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + first_chunk + program)
    end = tl.load(offsets_ptr + first_chunk + program + 1)
    rows = (logits_ptr, order_ptr, begin, end, row_stride, peak_ptr, log_sum_ptr)
    is_single = end - begin == 1
    row = tl.load(order_ptr + begin, mask=is_single, other=0).to(tl.int64)
    peak = tl.load(peak_ptr + row, mask=is_single, other=0.0)
    log_sum = tl.load(log_sum_ptr + row, mask=is_single, other=0.0) * LOG2_E
    single = (logits_ptr + row * row_stride, peak, log_sum)
    origin = first_column // BLOCK * BLOCK
    whole = tl.maximum(tl.where(is_single, width // BLOCK * BLOCK, 0), origin)
    widths = (origin, width, padded_width, whole)
    candidates = (values_ptr + program * capacity, columns_ptr + program * capacity, capacity)
    has_more = (begin < end) & (capacity < width)
    is_guess = has_more
    target = (places + capacity) // 2
    # Twice what as many places of a sum of 1 can have.
    highest = (tl.full((), 2.0, tl.float32) / places).to(tl.int32, bitcast=True)
    pending = True
    while pending:
        for start in range(0, capacity, LANES):
            slots = start + tl.arange(0, LANES)
            tl.store(values_ptr + program * capacity + slots, -1.0, mask=slots < capacity)
        # Before any thread stores a candidate there, and after all have in a first attempt.
        tl.debug_barrier()
        searching = has_more
        stride = tl.where(is_guess, COARSE * sample_stride, 1)
        span = tl.where(searching, WIDE, 0)
        low = tl.where(searching, tl.maximum(highest - (16 << span), 0), 0)
        above = 0
        within = 0
        while searching:
            counters = _counters(
                rows,
                single,
                excluded_ptr,
                widths,
                (low, span),
                stride,
                temperature,
                HAS_EXCLUDED,
                HAS_TEMPERATURE,
                BLOCK,
            )
            wanted = tl.where(is_guess, tl.maximum(target // stride, 1), places)
            chosen, within, beyond, counted = chosen_bin(counters, above, wanted)
            if (counted < wanted) & (low > 0):
                low = tl.maximum(low - (16 << span), 0)
            elif is_guess & (span < WIDE) & (chosen == 15) & (low + (15 << span) < highest):
                # The last bin has no upper end. Only NaN is the largest that often beyond.
                low += 15 << span
            elif is_guess:
                low += key_in_bin(chosen, within, beyond, wanted, span)
                searching = span == WIDE
                if searching:
                    # Around it in more columns.
                    span = tl.full((), NARROW, tl.int32)
                    low = tl.maximum(low - (8 << span), 0)
                    stride = stride // COARSE
            else:
                above = beyond
                low += chosen << span
                searching = (above + within > capacity) & (span > 0)
                span = tl.where(searching, tl.maximum(span - 4, 0), span)
        edge = low + (1 << span)
        cut = NOWHERE
        if (is_guess == 0) & (above + within > capacity):
            cut = _cut(
                rows,
                excluded_ptr,
                widths,
                low,
                edge,
                places - above,
                temperature,
                HAS_EXCLUDED,
                HAS_TEMPERATURE,
                LANES,
            )
        stored, rest = _store_largest(
            rows,
            single,
            excluded_ptr,
            widths,
            (low, edge, cut),
            candidates,
            temperature,
            HAS_EXCLUDED,
            HAS_TEMPERATURE,
            BLOCK,
        )
        tl.store(rest_ptr + program, rest)
        tl.debug_barrier()
        has_few = (stored < places) & (low > 0)
        pending = is_guess & (has_few | (stored > capacity))
        is_guess = False

"""Triton kernels: the largest mean probabilities of a chunk without sorting, and their keys."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import mean_probabilities
from megatron_ext.ops.kernel import kernel
from megatron_ext.ops.sorted_l1.key_bins import START, chosen_bin, count_keys, keys_of
from megatron_ext.ops.triton_math import LOG2_E, scaled

NEVER: tl.constexpr = tl.constexpr(0xFFFFFFFF)
"""Key above that of any probability, NaN too."""

NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Column beyond all."""

NO_KEY: tl.constexpr = tl.constexpr(-0x8000000000000000)
"""``sort_keys.NO_KEY``"""

LOW: tl.constexpr = tl.constexpr(0xFFFFFFFF)
"""The lower 32 bits."""

K: tl.constexpr = tl.constexpr(8)
"""Columns that a lane reads at once."""


@triton.jit
def _as_ordered(logits):
    """Numbers from 0 to 2 in the order of fp32 logits, NaN the largest.

    The last two bits of logits do not count, and 0.0 is -0.0.
    """
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    # The bits of negative numbers grow with their magnitude.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return (ordered >> 2).to(tl.float32, bitcast=True)


@triton.jit
def _single(row, excluded_ptr, columns, temperature, HAS_EXCLUDED, HAS_TEMPERATURE, BY_LOGIT):
    """Probabilities of a row at columns that are all real, and which are counted."""
    start_of_row, peak, log_sum = row
    logits = tl.load(start_of_row + columns).to(tl.float32)
    if BY_LOGIT:
        probabilities = _as_ordered(logits)
    else:
        values = scaled(logits, temperature, HAS_TEMPERATURE)
        probabilities = tl.exp2((values - peak) * LOG2_E - log_sum)
    counted = columns >= 0
    if HAS_EXCLUDED:
        counted = tl.load(excluded_ptr + columns) == 0
    return probabilities, counted


@triton.jit
def _mean(
    rows, excluded_ptr, columns, widths, temperature, HAS_EXCLUDED, HAS_TEMPERATURE, BY_LOGIT
):
    """Mean probabilities of a chunk's rows at any columns, and which are counted."""
    logits_ptr, order_ptr, begin, end, row_stride, peak_ptr, log_sum_ptr = rows
    width, padded_width = widths
    held = columns < padded_width
    counted = columns < width
    if HAS_EXCLUDED:
        counted = counted & (tl.load(excluded_ptr + columns, mask=held, other=1) == 0)
    if BY_LOGIT:
        row = tl.load(order_ptr + begin).to(tl.int64)
        logits = tl.load(logits_ptr + row * row_stride + columns, mask=held, other=0.0)
        probabilities = _as_ordered(logits.to(tl.float32))
    else:
        probabilities = mean_probabilities(
            logits_ptr,
            order_ptr,
            begin,
            end,
            row_stride,
            peak_ptr,
            log_sum_ptr,
            columns,
            held,
            counted,
            temperature,
            HAS_TEMPERATURE,
        )
    return probabilities, counted


@triton.jit
def _apart(block, LANES: tl.constexpr):
    """The eight columns of a block [LANES, 8], each [LANES]: a lane keeps its own in registers."""
    even, odd = tl.split(block.reshape(LANES, 4, 2))
    even_0, even_1 = tl.split(even.reshape(LANES, 2, 2))
    odd_0, odd_1 = tl.split(odd.reshape(LANES, 2, 2))
    of_0, of_4 = tl.split(even_0)
    of_2, of_6 = tl.split(even_1)
    of_1, of_5 = tl.split(odd_0)
    of_3, of_7 = tl.split(odd_1)
    return of_0, of_1, of_2, of_3, of_4, of_5, of_6, of_7


@triton.jit
def _is_hit(probability, counted, low, MASKED: tl.constexpr):
    hit = keys_of(probability) >= low
    if MASKED:
        hit = hit & counted
    return hit


@triton.jit
def _hits(block, low, MASKED: tl.constexpr):
    """How many of a lane's eight probabilities have keys from ``low`` [LANES] on."""
    probabilities, counted = block
    hits = tl.zeros(low.shape, tl.int32)
    for k in tl.static_range(K):
        hits += _is_hit(probabilities[k], counted[k], low, MASKED).to(tl.int32)
    return hits


@triton.jit
def _store(candidates, block, place, end, column, low, rest, MASKED: tl.constexpr):
    """Store a lane's hits from ``place`` to ``end`` if all have room, and add up the others."""
    values_ptr, columns_ptr, capacity = candidates
    probabilities, counted = block
    low = tl.where(end <= capacity, low, NEVER)
    for k in tl.static_range(K):
        hit = _is_hit(probabilities[k], counted[k], low, MASKED)
        tl.store(values_ptr + place, probabilities[k], mask=hit)
        tl.store(columns_ptr + place, column + k, mask=hit)
        place += hit.to(tl.int32)
        is_other = hit == 0
        if MASKED:
            is_other = is_other & counted[k]
        rest = tl.where(is_other, rest + probabilities[k], rest)
    return rest


@triton.jit
def _lowest(column, threshold):
    """Least key that is stored of each lane's columns, which begin at ``column``."""
    low, edge, cut = threshold
    return tl.where(column < cut, low, edge).to(tl.uint32)


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
    BY_LOGIT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Column, the first of a lane, before which ``missing`` keys or few more are from ``low`` on.

    Keys from ``edge`` on are not among them.
    """
    lanes = tl.arange(0, LANES)
    block = lanes[:, None] * K + tl.arange(0, K)[None, :]
    width, _ = widths
    start = 0
    found = 0
    cut = NOWHERE
    while (start < width) & (found < missing):
        probabilities, counted = _mean(
            rows,
            excluded_ptr,
            start + block,
            widths,
            temperature,
            HAS_EXCLUDED,
            HAS_TEMPERATURE,
            BY_LOGIT,
        )
        keys = keys_of(probabilities)
        ties = (keys >= low.to(tl.uint32)) & (keys < edge.to(tl.uint32)) & counted
        of_lane = tl.sum(ties.to(tl.int32), axis=1)
        until = found + tl.cumsum(of_lane, axis=0)
        ends = start + (lanes + 1) * K
        cut = tl.min(tl.where(until >= missing, ends, NOWHERE), axis=0)
        found += tl.sum(of_lane, axis=0)
        start += LANES * K
    return cut


@kernel(do_not_specialize=["first_chunk", "first_column", "width", "places", "capacity"])
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
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BY_LOGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: ``places`` to ``capacity`` of its largest mean probabilities.

    Columns before ``first_column`` are excluded: blocks of them are not read.
    ``values`` [C', capacity] is filled with -1 before. An interval of keys that contains the
    ``places``-th largest is cut in 16 by counting, until the keys from its lower end on fit into
    ``capacity``, or are all equal. The whole blocks of a single row are loaded ahead of time.
    ``BY_LOGIT``: chunks are single rows, and what stands for probabilities orders their logits.
    """
    LANES: tl.constexpr = BLOCK // (2 * K)
    HALF: tl.constexpr = LANES * K
    program = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + first_chunk + program)
    end = tl.load(offsets_ptr + first_chunk + program + 1)
    rows = (logits_ptr, order_ptr, begin, end, row_stride, peak_ptr, log_sum_ptr)
    widths = (width, padded_width)
    is_single = end - begin == 1
    row = tl.load(order_ptr + begin, mask=is_single, other=0).to(tl.int64)
    peak = 0.0
    log_sum = 0.0
    if not BY_LOGIT:
        peak = tl.load(peak_ptr + row, mask=is_single, other=0.0)
        log_sum = tl.load(log_sum_ptr + row, mask=is_single, other=0.0) * LOG2_E
    single = (logits_ptr + row * row_stride, peak, log_sum)
    origin = first_column // BLOCK * BLOCK
    whole = tl.maximum(tl.where(is_single, width // BLOCK * BLOCK, 0), origin)
    lanes = tl.arange(0, LANES) * K
    block = lanes[:, None] + tl.arange(0, K)[None, :]
    searching = (begin < end) & (capacity < width)
    low = tl.where(searching, START, 0)
    span = tl.where(searching, 25, 0)
    above = 0
    within = 0
    while searching:
        first = tl.zeros((LANES,), tl.int64)
        second = tl.zeros((LANES,), tl.int64)
        third = tl.zeros((LANES,), tl.int64)
        fourth = tl.zeros((LANES,), tl.int64)
        for start in tl.range(origin, whole, BLOCK, num_stages=3):
            for half in tl.static_range(2):
                probabilities, counted = _single(
                    single,
                    excluded_ptr,
                    start + half * HALF + block,
                    temperature,
                    HAS_EXCLUDED,
                    HAS_TEMPERATURE,
                    BY_LOGIT,
                )
                first, second, third, fourth = count_keys(
                    (first, second, third, fourth),
                    keys_of(probabilities),
                    counted,
                    low,
                    span,
                    HAS_EXCLUDED,
                )
        for start in range(whole, width, HALF):
            probabilities, counted = _mean(
                rows,
                excluded_ptr,
                start + block,
                widths,
                temperature,
                HAS_EXCLUDED,
                HAS_TEMPERATURE,
                BY_LOGIT,
            )
            first, second, third, fourth = count_keys(
                (first, second, third, fourth), keys_of(probabilities), counted, low, span, True
            )
        chosen, within, beyond, total = chosen_bin((first, second, third, fourth), above, places)
        if (low == START) & (span == 25) & (total < places):
            # Fewer keys than places are that large: all of them, in bins of 2^26.
            low = 0
            span = 26
        else:
            above = beyond
            low += chosen << span
            searching = (above + within > capacity) & (span > 0)
            span = tl.where(searching, tl.maximum(span - 4, 0), span)
    edge = low + (1 << span)
    cut = NOWHERE
    if above + within > capacity:
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
            BY_LOGIT,
            LANES,
        )
    threshold = (low, edge, cut)
    candidates = (values_ptr + program * capacity, columns_ptr + program * capacity, capacity)
    stored = 0
    rest = tl.zeros((LANES,), tl.float32)
    for start in tl.range(origin, whole, BLOCK, num_stages=3):
        # Two blocks with one prefix sum.
        column = start + lanes
        probabilities, counted = _single(
            single,
            excluded_ptr,
            start + block,
            temperature,
            HAS_EXCLUDED,
            HAS_TEMPERATURE,
            BY_LOGIT,
        )
        first_half = (_apart(probabilities, LANES), _apart(counted, LANES))
        probabilities, counted = _single(
            single,
            excluded_ptr,
            start + HALF + block,
            temperature,
            HAS_EXCLUDED,
            HAS_TEMPERATURE,
            BY_LOGIT,
        )
        second_half = (_apart(probabilities, LANES), _apart(counted, LANES))
        low_first = _lowest(column, threshold)
        low_second = _lowest(column + HALF, threshold)
        hits = _hits(first_half, low_first, HAS_EXCLUDED)
        hits += _hits(second_half, low_second, HAS_EXCLUDED) << 16
        until = tl.cumsum(hits, axis=0)
        total = tl.sum(hits, axis=0)
        place = stored + ((until - hits) & 0xFFFF)
        ends = stored + (until & 0xFFFF)
        rest = _store(candidates, first_half, place, ends, column, low_first, rest, HAS_EXCLUDED)
        stored += total & 0xFFFF
        place = stored + ((until - hits) >> 16)
        ends = stored + (until >> 16)
        rest = _store(
            candidates, second_half, place, ends, column + HALF, low_second, rest, HAS_EXCLUDED
        )
        stored += total >> 16
    for start in range(whole, width, HALF):
        column = start + lanes
        probabilities, counted = _mean(
            rows,
            excluded_ptr,
            start + block,
            widths,
            temperature,
            HAS_EXCLUDED,
            HAS_TEMPERATURE,
            BY_LOGIT,
        )
        both = (_apart(probabilities, LANES), _apart(counted, LANES))
        lowest = _lowest(column, threshold)
        hits = _hits(both, lowest, True)
        until = stored + tl.cumsum(hits, axis=0)
        rest = _store(candidates, both, until - hits, until, column, lowest, rest, True)
        stored += tl.sum(hits, axis=0)
    tl.store(rest_ptr + program, tl.sum(rest, axis=0))


@kernel(do_not_specialize=["first_row"])
def candidate_keys_kernel(
    logits_ptr,
    value_ptr,
    column_ptr,
    first_row,
    row_stride,
    start,
    candidates,
    keys_ptr,
    BLOCK: tl.constexpr,
):
    """``sort_keys`` of a row's candidates, ``NO_KEY`` where ``value`` is negative."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    at = row * candidates + entry
    exists = entry < candidates
    is_one = exists & (tl.load(value_ptr + at, mask=exists, other=-1.0) >= 0.0)
    column = tl.load(column_ptr + at, mask=is_one, other=0)
    logit = tl.load(logits_ptr + (first_row + row) * row_stride + column, mask=is_one, other=0.0)
    logit = logit.to(tl.float32)
    # 0.0 and -0.0 are equal, but have other bits.
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    # The bits of negative numbers grow with their magnitude.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = (ordered << 32) | (LOW - (column.to(tl.int64) + start))
    tl.store(keys_ptr + at, tl.where(is_one, key, NO_KEY), mask=exists)


@kernel()
def columns_of_keys_kernel(keys_ptr, keys, columns, column_ptr, BLOCK: tl.constexpr):
    """``key_columns`` of a row's ``keys``, -1 for none and beyond the last."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row * keys + entry, mask=entry < keys, other=NO_KEY)
    column = tl.where(key == NO_KEY, -1, LOW - (key & LOW))
    tl.store(column_ptr + row * columns + entry, column, mask=entry < columns)

"""Triton kernels of the sorted L1: largest probabilities without sorting, and their gradients."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import mean_probabilities, row_probabilities
from megatron_ext.ops.triton_math import LOG2_E, scaled

START: tl.constexpr = tl.constexpr(0x30000000)
"""Key of 2^-31, the least that is looked for at first: 16 bins of two octaves end at 2."""

LAST_KEY: tl.constexpr = tl.constexpr(0x3FFFFFFF)
"""Key of NaN, above that of any probability."""

NIBBLES: tl.constexpr = tl.constexpr(0x000F000F000F000F)
"""Every fourth of the 16 counters of 4 bits in a word."""


@triton.jit
def _keys(probabilities):
    """Bits of probabilities as ordered keys: 0 to 2^30 - 1, which is NaN."""
    bits = probabilities.to(tl.uint32, bitcast=True)
    return tl.minimum(bits, LAST_KEY).to(tl.int32)


@triton.jit
def _counted(excluded_ptr, columns, held, width, HAS_EXCLUDED: tl.constexpr):
    counted = columns < width
    if HAS_EXCLUDED:
        counted = counted & (tl.load(excluded_ptr + columns, mask=held, other=1) == 0)
    return counted


@triton.jit
def _single_block(
    start_of_row,
    excluded_ptr,
    columns,
    peak,
    log_sum,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Probabilities of a row at columns that are all real, and which are counted."""
    loaded = tl.load(start_of_row + columns).to(tl.float32)
    values = scaled(loaded, temperature, HAS_TEMPERATURE)
    probabilities = tl.exp2((values - peak) * LOG2_E - log_sum)
    counted = columns >= 0
    if HAS_EXCLUDED:
        counted = tl.load(excluded_ptr + columns) == 0
    return probabilities, counted


@triton.jit
def _count(counters, keys, counted, low, span, HAS_EXCLUDED: tl.constexpr):
    """Counters [LANES] after keys [LANES, 8] in 16 bins from ``low``, 2^``span`` wide.

    A lane has four words of four counters of 16 bits: bin b is in word b % 4 at place b // 4.
    """
    first, second, third, fourth = counters
    bins = (keys - low).to(tl.uint32, bitcast=True) >> span
    fits = bins < 16
    if HAS_EXCLUDED:
        fits = fits & counted
    nibbles = tl.sum(fits.to(tl.int64) << ((bins & 15) * 4).to(tl.int64), axis=1)
    first += nibbles & NIBBLES
    second += (nibbles >> 4) & NIBBLES
    third += (nibbles >> 8) & NIBBLES
    fourth += (nibbles >> 12) & NIBBLES
    return first, second, third, fourth


@triton.jit
def _word_counts(word):
    """Counts [4] of a word's counters in all lanes."""
    shifts = (tl.arange(0, 4)[None, :] * 16).to(tl.int64)
    return tl.sum((word[:, None] >> shifts).to(tl.int32) & 0xFFFF, axis=0)


@triton.jit
def _chosen_bin(counters, above, places):
    """Bin with the ``places``-th largest key, how many are in it, above it, and in all bins."""
    first, second, third, fourth = counters
    of_0 = _word_counts(first)
    of_1 = _word_counts(second)
    of_2 = _word_counts(third)
    of_3 = _word_counts(fourth)
    fours = of_0 + of_1 + of_2 + of_3
    bins = 4 * tl.arange(0, 4)
    # Keys from the lower end of each bin on.
    from_3 = above + tl.cumsum(fours, axis=0, reverse=True) - fours + of_3
    from_2 = from_3 + of_2
    from_1 = from_2 + of_1
    from_0 = from_1 + of_0
    found = tl.where(from_0 >= places, bins, 0)
    found = tl.where(from_1 >= places, bins + 1, found)
    found = tl.where(from_2 >= places, bins + 2, found)
    found = tl.where(from_3 >= places, bins + 3, found)
    chosen = tl.max(found, axis=0)
    counts = tl.where(chosen % 4 < 2, of_0, of_2)
    from_here = tl.where(chosen % 4 < 2, from_0, from_2)
    if chosen % 2 == 1:
        counts = tl.where(chosen % 4 < 2, of_1, of_3)
        from_here = tl.where(chosen % 4 < 2, from_1, from_3)
    is_chosen = bins == chosen // 4 * 4
    within = tl.sum(tl.where(is_chosen, counts, 0), axis=0)
    beyond = tl.sum(tl.where(is_chosen, from_here, 0), axis=0) - within
    return chosen, within, beyond, tl.sum(fours, axis=0)


@triton.jit
def _store_chosen(
    values_ptr,
    columns_ptr,
    columns,
    probabilities,
    counted,
    low,
    edge,
    surely,
    above,
    capacity,
):
    """Store the candidates of a block [LANES, 8]; count them, and add up the others by lane.

    Those from ``edge`` on have the places before ``above``, and those from ``low`` on the
    places after it, each in the order of columns.
    """
    keys = _keys(probabilities)
    is_sure = (keys >= edge) & counted
    is_open = (keys >= low) & (keys < edge) & counted
    # Both counts in one word: a block has less than 2^16 columns.
    ones = tl.where(is_sure, 1, tl.where(is_open, 1 << 16, 0))
    within = tl.cumsum(ones, axis=1)
    of_lane = tl.sum(ones, axis=1)
    until = tl.cumsum(of_lane, axis=0)
    places = within + (until - of_lane)[:, None]
    place = tl.where(is_sure, surely + (places & 0xFFFF), above + (places >> 16))
    taken = (ones > 0) & (place <= capacity)
    tl.store(values_ptr + (place - 1), probabilities, mask=taken)
    tl.store(columns_ptr + (place - 1), columns, mask=taken)
    rest = tl.sum(tl.where(counted & (taken == 0), probabilities, 0.0), axis=1)
    total = tl.sum(of_lane, axis=0)
    return rest, surely + (total & 0xFFFF), above + (total >> 16)


@triton.jit(do_not_specialize=["first_chunk"])
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
    width,
    padded_width,
    places,
    capacity,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: ``places`` to ``capacity`` of its largest mean probabilities.

    ``values`` [C', capacity] is filled with -1 before. An interval of keys that contains the
    ``places``-th largest is cut in 16 by counting, until the keys from its lower end on fit into
    ``capacity``, or are all equal. The whole blocks of a single row are loaded ahead of time.
    """
    K: tl.constexpr = 8
    LANES: tl.constexpr = BLOCK // K
    program = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + first_chunk + program)
    end = tl.load(offsets_ptr + first_chunk + program + 1)
    is_single = end - begin == 1
    row = tl.load(order_ptr + begin, mask=is_single, other=0).to(tl.int64)
    start_of_row = logits_ptr + row * row_stride
    peak = tl.load(peak_ptr + row, mask=is_single, other=0.0)
    log_sum = tl.load(log_sum_ptr + row, mask=is_single, other=0.0) * LOG2_E
    whole = tl.where(is_single, width // BLOCK * BLOCK, 0)
    block = tl.arange(0, LANES)[:, None] * K + tl.arange(0, K)[None, :]
    low = tl.where(begin < end, START, 0)
    span = 24
    above = 0
    searching = begin < end
    while searching:
        first = tl.zeros((LANES,), tl.int64)
        second = tl.zeros((LANES,), tl.int64)
        third = tl.zeros((LANES,), tl.int64)
        fourth = tl.zeros((LANES,), tl.int64)
        for start in tl.range(0, whole, BLOCK, num_stages=3):
            probabilities, counted = _single_block(
                start_of_row,
                excluded_ptr,
                start + block,
                peak,
                log_sum,
                temperature,
                HAS_EXCLUDED,
                HAS_TEMPERATURE,
            )
            first, second, third, fourth = _count(
                (first, second, third, fourth),
                _keys(probabilities),
                counted,
                low,
                span,
                HAS_EXCLUDED,
            )
        for start in range(whole, width, BLOCK):
            columns = start + block
            held = columns < padded_width
            counted = _counted(excluded_ptr, columns, held, width, HAS_EXCLUDED)
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
            first, second, third, fourth = _count(
                (first, second, third, fourth), _keys(probabilities), counted, low, span, True
            )
        chosen, within, beyond, counted = _chosen_bin((first, second, third, fourth), above, places)
        if (low == START) & (span == 24) & (counted < places):
            # Fewer keys than places are that large: all of them, in bins of 2^28.
            low = 0
            span = 28
        else:
            above = beyond
            low += chosen << span
            searching = (above + within > capacity) & (span > 0)
            span = tl.where(searching, span - 4, span)
    edge = low + (1 << span)
    surely = 0
    rest = tl.zeros((LANES,), tl.float32)
    values_ptr += program * capacity
    columns_ptr += program * capacity
    for start in tl.range(0, whole, BLOCK, num_stages=3):
        columns = start + block
        probabilities, counted = _single_block(
            start_of_row,
            excluded_ptr,
            columns,
            peak,
            log_sum,
            temperature,
            HAS_EXCLUDED,
            HAS_TEMPERATURE,
        )
        others, surely, above = _store_chosen(
            values_ptr,
            columns_ptr,
            columns,
            probabilities,
            counted,
            low,
            edge,
            surely,
            above,
            capacity,
        )
        rest += others
    for start in range(whole, width, BLOCK):
        columns = start + block
        held = columns < padded_width
        counted = _counted(excluded_ptr, columns, held, width, HAS_EXCLUDED)
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
        others, surely, above = _store_chosen(
            values_ptr,
            columns_ptr,
            columns,
            probabilities,
            counted,
            low,
            edge,
            surely,
            above,
            capacity,
        )
        rest += others
    tl.store(rest_ptr + program, tl.sum(rest, axis=0))


@triton.jit(do_not_specialize=["first_chunk"])
def keep_chosen_kernel(
    logits_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    columns_ptr,
    signs_ptr,
    kept_ptr,
    centre_ptr,
    first_chunk,
    row_stride,
    capacity,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: its rows' logits at the candidates, and ``sum q_i sign``.

    Candidates and signs are [C', capacity], ``kept`` is [T, capacity], ``centre`` [T].
    """
    program = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + first_chunk + program)
    end = tl.load(offsets_ptr + first_chunk + program + 1)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        peak = tl.load(peak_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        centre = 0.0
        for start in range(0, capacity, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            inside = slots < capacity
            sign = tl.load(signs_ptr + program * capacity + slots, mask=inside, other=0)
            used = sign != 0
            column = tl.load(columns_ptr + program * capacity + slots, mask=used, other=0)
            loaded = tl.load(logits_ptr + row * row_stride + column, mask=used, other=-float("inf"))
            tl.store(kept_ptr + row * capacity + slots, loaded, mask=inside)
            values = scaled(loaded, temperature, HAS_TEMPERATURE)
            share = tl.exp(values - peak - log_sum) * sign.to(tl.float32)
            centre += tl.sum(tl.where(used, share, 0.0), axis=0)
        tl.store(centre_ptr + row, centre)


@triton.jit(do_not_specialize=["first_chunk"])
def spread_kernel(
    logits_ptr,
    gradient_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    centre_ptr,
    scale_ptr,
    first_chunk,
    row_stride,
    gradient_stride,
    width,
    valid_width,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each chunk: ``-q_i centre_i scale_c`` in its rows, 0 in padding."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + chunk)
    end = tl.load(offsets_ptr + chunk + 1)
    scale = tl.load(scale_ptr + chunk)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        centre = tl.load(centre_ptr + row)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            held = columns < width
            valid = columns < valid_width
            probabilities = row_probabilities(
                logits_ptr,
                row,
                row_stride,
                peak_ptr,
                log_sum_ptr,
                columns,
                held,
                valid,
                temperature,
                HAS_TEMPERATURE,
            )
            slope = tl.where(valid, -probabilities * centre * scale, 0.0)
            slope = tl.where(scale == 0.0, 0.0, slope)
            # The gradient may be the logits, which other threads may still be reading.
            tl.debug_barrier()
            place_of = gradient_ptr + row * gradient_stride + columns
            tl.store(place_of, slope.to(gradient_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["first_chunk"])
def write_chosen_kernel(
    kept_ptr,
    gradient_ptr,
    order_ptr,
    offsets_ptr,
    peak_ptr,
    log_sum_ptr,
    columns_ptr,
    signs_ptr,
    centre_ptr,
    base_ptr,
    scale_ptr,
    first_chunk,
    gradient_stride,
    capacity,
    weight,
    temperature,
    HAS_BASE: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``q_i (base_c + weight sign - centre_i) scale_c`` at the candidates, by chunk."""
    program = tl.program_id(0).to(tl.int64)
    chunk = first_chunk + program
    begin = tl.load(offsets_ptr + chunk)
    end = tl.load(offsets_ptr + chunk + 1)
    scale = tl.load(scale_ptr + chunk)
    base = 0.0
    if HAS_BASE:
        base = tl.load(base_ptr + chunk)
    for place in range(begin, end):
        row = tl.load(order_ptr + place).to(tl.int64)
        peak = tl.load(peak_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        centre = tl.load(centre_ptr + row)
        for start in range(0, capacity, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            sign = tl.load(signs_ptr + program * capacity + slots, mask=slots < capacity, other=0)
            used = sign != 0
            column = tl.load(columns_ptr + program * capacity + slots, mask=used, other=0)
            loaded = tl.load(kept_ptr + row * capacity + slots, mask=used, other=-float("inf"))
            values = scaled(loaded, temperature, HAS_TEMPERATURE)
            slope = base + weight * sign.to(tl.float32) - centre
            slope = tl.exp(values - peak - log_sum) * slope * scale
            slope = tl.where(scale == 0.0, 0.0, slope)
            tl.store(
                gradient_ptr + row * gradient_stride + column,
                slope.to(gradient_ptr.dtype.element_ty),
                mask=used,
            )

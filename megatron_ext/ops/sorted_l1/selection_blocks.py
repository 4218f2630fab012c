"""Blocks of columns inside of the kernel that selects: their probabilities, and where hits go."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import mean_probabilities
from megatron_ext.ops.sorted_l1.key_bins import keys_of
from megatron_ext.ops.triton_math import LOG2_E, UNPACKS, scaled

K: tl.constexpr = tl.constexpr(8)
"""Columns that a lane reads at once."""


@triton.jit
def apart(block, LANES: tl.constexpr):
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
def _without(probability, is_left_out):
    """-0 where a column is left out, whose bits are those of the least integer."""
    least = tl.full((), -(2**31), tl.int32).to(tl.float32, bitcast=True)
    # Other processors may have negative bits for NaN.
    positive = probability if UNPACKS else tl.abs(probability)
    return tl.where(is_left_out, least, positive)


@triton.jit
def single_block(
    row,
    excluded_ptr,
    start,
    block,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Eight probabilities [LANES] of a row, at columns that are all real; -0 where excluded.

    ``block`` [LANES] are the lanes' first columns from ``start`` on, all multiples of 8.
    """
    start_of_row, peak, log_sum = row
    columns = start + block[:, None] + tl.arange(0, K)[None, :]
    values = scaled(tl.load(start_of_row + columns), temperature, HAS_TEMPERATURE)
    found = apart(tl.exp2((values - peak) * LOG2_E - log_sum), block.numel)
    if HAS_EXCLUDED:
        # Four columns in a word.
        words_ptr = excluded_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        words = start // 4 + block[:, None] // 4 + tl.arange(0, 2)[None, :]
        first, second = tl.split(tl.load(words_ptr + words))
        found = (
            _without(found[0], (first & 0xFF) != 0),
            _without(found[1], (first & 0xFF00) != 0),
            _without(found[2], (first & 0xFF0000) != 0),
            _without(found[3], (first >> 24) != 0),
            _without(found[4], (second & 0xFF) != 0),
            _without(found[5], (second & 0xFF00) != 0),
            _without(found[6], (second & 0xFF0000) != 0),
            _without(found[7], (second >> 24) != 0),
        )
    elif not UNPACKS:
        found = apart(tl.abs(tl.exp2((values - peak) * LOG2_E - log_sum)), block.numel)
    return found


@triton.jit
def mean_block(
    rows,
    excluded_ptr,
    start,
    block,
    widths,
    temperature,
    HAS_EXCLUDED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """The same of a chunk of any number of rows; -0 also where a column is not real."""
    logits_ptr, order_ptr, begin, end, row_stride, peak_ptr, log_sum_ptr = rows
    _, width, padded_width, _ = widths
    columns = start + block[:, None] + tl.arange(0, K)[None, :]
    held = columns < padded_width
    counted = columns < width
    if HAS_EXCLUDED:
        counted = counted & (tl.load(excluded_ptr + columns, mask=held, other=1) == 0)
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
    return apart(_without(probabilities, counted == 0), block.numel)


@triton.jit
def hits_of_lanes(block, low):
    """How many of a lane's eight probabilities have keys from ``low`` [LANES] on."""
    hits = tl.zeros(low.shape, tl.int32)
    for k in tl.static_range(K):
        hits += (keys_of(block[k]) >= low).to(tl.int32)
    return hits


@triton.jit
def store_hits(candidates, block, place, end, column, low, rest):
    """Store a lane's hits from ``place`` to ``end`` if all have room, and add up the others."""
    values_ptr, columns_ptr, capacity = candidates
    has_room = end <= capacity
    for k in tl.static_range(K):
        hit = (keys_of(block[k]) >= low) & has_room
        tl.store(values_ptr + place, block[k], mask=hit)
        tl.store(columns_ptr + place, column + k, mask=hit)
        place += hit.to(tl.int32)
        rest = tl.where(hit, rest, rest + block[k])
    return rest


@triton.jit
def lowest_keys(column, threshold):
    """Least key that is stored of each lane's columns, which begin at ``column``."""
    low, edge, cut = threshold
    return tl.where(column < cut, low, edge)

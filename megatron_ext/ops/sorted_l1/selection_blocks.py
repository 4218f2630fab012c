"""Blocks of columns inside of the kernel that selects: their probabilities, and where hits go."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import mean_probabilities
from megatron_ext.ops.sorted_l1.key_bins import keys_of
from megatron_ext.ops.triton_math import LOG2_E, scaled

K: tl.constexpr = tl.constexpr(8)
"""Columns that a lane reads at once."""

NEVER: tl.constexpr = tl.constexpr(0xFFFFFFFF)
"""Key above that of any probability, NaN too."""


@triton.jit
def single_block(row, excluded_ptr, columns, temperature, HAS_EXCLUDED, HAS_TEMPERATURE):
    """Probabilities of a row at columns that are all real, and which are counted."""
    start_of_row, peak, log_sum = row
    values = scaled(tl.load(start_of_row + columns).to(tl.float32), temperature, HAS_TEMPERATURE)
    probabilities = tl.exp2((values - peak) * LOG2_E - log_sum)
    counted = columns >= 0
    if HAS_EXCLUDED:
        counted = tl.load(excluded_ptr + columns) == 0
    return probabilities, counted


@triton.jit
def mean_block(rows, excluded_ptr, columns, widths, temperature, HAS_EXCLUDED, HAS_TEMPERATURE):
    """Mean probabilities of a chunk's rows at any columns, and which are counted."""
    logits_ptr, order_ptr, begin, end, row_stride, peak_ptr, log_sum_ptr = rows
    width, padded_width, _ = widths
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
    return probabilities, counted


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
def _is_hit(probability, counted, low, MASKED: tl.constexpr):
    hit = keys_of(probability) >= low
    if MASKED:
        hit = hit & counted
    return hit


@triton.jit
def hits_of_lanes(block, low, MASKED: tl.constexpr):
    """How many of a lane's eight probabilities have keys from ``low`` [LANES] on."""
    probabilities, counted = block
    hits = tl.zeros(low.shape, tl.int32)
    for k in tl.static_range(K):
        hits += _is_hit(probabilities[k], counted[k], low, MASKED).to(tl.int32)
    return hits


@triton.jit
def lowest_keys(column, threshold):
    """Least key that is stored of each lane's columns, which begin at ``column``."""
    low, edge, cut = threshold
    return tl.where(column < cut, low, edge).to(tl.uint32)


@triton.jit
def store_hits(candidates, block, place, end, column, low, rest, MASKED: tl.constexpr):
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

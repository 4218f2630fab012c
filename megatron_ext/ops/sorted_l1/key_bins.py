"""Counts of probabilities by their bits, in 16 bins, inside of Triton kernels."""

import triton
import triton.language as tl

NIBBLES: tl.constexpr = tl.constexpr(0x000F000F000F000F)
"""Every fourth of the 16 counters of 4 bits in a word."""


@triton.jit
def keys_of(probabilities):
    """Bits of probabilities: as integers they are ordered alike. NaN is last, -0 negative."""
    return probabilities.to(tl.int32, bitcast=True)


@triton.jit
def count_keys(counters, block, low, span):
    """Counters [LANES] after eight probabilities of each lane in 16 bins from ``low`` on.

    A bin is 2^``span`` wide; the last has all keys above it too. A lane has four words of four
    counters of 16 bits: bin b is in word b % 4 at place b // 4.
    """
    first, second, third, fourth = counters
    top = low + (16 << span) - 1
    nibbles = tl.zeros(first.shape, tl.int64)
    for k in tl.static_range(8):
        bins = (tl.minimum(keys_of(block[k]), top) - low).to(tl.uint32, bitcast=True) >> span
        # What is below the first wraps to far above the last.
        fits = bins < 16
        nibbles += fits.to(tl.int64) << ((bins & 15) * 4).to(tl.int64)
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
def chosen_bin(counters, above, places):
    """Bin with the ``places``-th largest key, how many are in it, above it, and in all bins.

    ``above`` are beyond the last bin, and counted in it.
    """
    first, second, third, fourth = counters
    bins = 4 * tl.arange(0, 4)
    of_0 = _word_counts(first)
    of_1 = _word_counts(second)
    of_2 = _word_counts(third)
    of_3 = _word_counts(fourth) - tl.where(bins == 12, above, 0)
    fours = of_0 + of_1 + of_2 + of_3
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
    return chosen, within, beyond, above + tl.sum(fours, axis=0)


@triton.jit
def key_in_bin(chosen, within, beyond, places, span):
    """Key, from the first bin on, that about ``places`` keys reach: counts fall by an even factor.

    The bin that is ``chosen`` has the ``places``-th largest.
    """
    beyond = tl.maximum(beyond.to(tl.float32), 0.5)
    all_here = tl.log2((beyond + within) / beyond)
    share = tl.minimum(tl.log2(places / beyond) / tl.maximum(all_here, 1e-6), 1.0)
    return ((chosen + 1) << span) - (share * (1 << span)).to(tl.int32)

"""Counts of probabilities by their bits, in 16 bins, inside of Triton kernels."""

import triton
import triton.language as tl

START: tl.constexpr = tl.constexpr(0x20000000)
"""Key of 2^-63, the least that is looked for at first: 16 bins of four octaves end at 2."""

NIBBLES: tl.constexpr = tl.constexpr(0x000F000F000F000F)
"""Every fourth of the 16 counters of 4 bits in a word."""


@triton.jit
def keys_of(probabilities):
    """Bits of probabilities, which are ordered as they are: they are not negative. NaN is last."""
    return probabilities.to(tl.uint32, bitcast=True)


@triton.jit
def count_keys(counters, keys, counted, low, span, MASKED: tl.constexpr):
    """Counters [LANES] after keys [LANES, 8] in 16 bins from ``low``, 2^``span`` wide.

    The last has all keys above it too. A lane has four words of four counters of 16 bits: bin b is
    in word b % 4 at place b // 4.
    """
    first, second, third, fourth = counters
    top = (low + (16 << span) - 1).to(tl.uint32)
    bins = (tl.minimum(keys, top) - low.to(tl.uint32)) >> span
    fits = bins < 16
    if MASKED:
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

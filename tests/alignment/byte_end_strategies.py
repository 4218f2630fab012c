"""Byte ends of random tokenizations, with tokens that cover nothing."""

import numpy as np
from hypothesis import strategies as st


def ends_of(*widths):
    return np.cumsum(np.array(widths, dtype=np.int64))


@st.composite
def byte_ends(draw, total):
    # One bit per byte says whether a token ends there: one draw, where a set would take a dozen.
    bits = draw(st.integers(0, 2**total - 1))
    if draw(st.booleans()):
        bits &= draw(st.integers(0, 2**total - 1))
    ends = [end for end in range(1, total + 1) if end == total or bits >> (end - 1) & 1]
    repeats = draw(st.lists(st.sampled_from([0, *ends]), max_size=5))
    return np.array(sorted(ends + repeats), dtype=np.int64)


@st.composite
def pairs(draw):
    total = draw(st.integers(0, 24))
    other = total if draw(st.booleans()) else draw(st.integers(0, 24))
    return draw(byte_ends(total)), draw(byte_ends(other))

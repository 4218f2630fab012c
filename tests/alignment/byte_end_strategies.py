"""Byte ends of random tokenizations, with tokens that cover nothing."""

import numpy as np
from hypothesis import strategies as st


def ends_of(*widths):
    return np.cumsum(np.array(widths, dtype=np.int64))


@st.composite
def byte_ends(draw, total, zero_width=True):
    cuts = draw(st.sets(st.integers(1, total), max_size=12)) if total else set()
    ends = sorted(cuts | ({total} if total else set()))
    if zero_width:
        repeats = draw(st.lists(st.sampled_from([0, *ends]), max_size=5))
        ends = sorted(ends + repeats)
    return np.array(ends, dtype=np.int64)


@st.composite
def pairs(draw):
    total = draw(st.integers(0, 24))
    other = total if draw(st.booleans()) else draw(st.integers(0, 24))
    return draw(byte_ends(total)), draw(byte_ends(other))

"""Ids of many texts in one buffer."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.tokenizers.engine.gigatoken_engine import flat_ids, interleave, join

ROW = st.lists(st.integers(0, 2**31 - 1), max_size=4)
ROWS = st.lists(ROW, max_size=8)


def rows_of(flat):
    ids, offsets = flat
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    return [ids[begin:end].tolist() for begin, end in pairwise(offsets)]


@given(ROWS)
def test_rows_come_back_from_one_buffer(rows):
    assert rows_of(flat_ids(rows)) == rows


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_joined_parts_are_their_rows_in_order(parts):
    assert rows_of(join([flat_ids(rows) for rows in parts])) == list(chain(*parts))


def test_one_part_is_not_copied():
    part = flat_ids([[1, 2], [3]])
    assert join([part])[0] is part[0]


@given(st.lists(st.tuples(st.booleans(), ROW), max_size=12))
def test_rows_set_aside_return_to_their_places(rows):
    aside = [i for i, (is_aside, _) in enumerate(rows) if is_aside]
    rest = flat_ids([row for is_aside, row in rows if not is_aside])
    apart = flat_ids([rows[i][1] for i in aside])
    assert rows_of(interleave(rest, apart, aside)) == [row for _, row in rows]

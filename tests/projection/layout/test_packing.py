"""Filling ranks evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.projection.layout.packing import NOWHERE, filled, spread


@pytest.mark.parametrize(
    ("count", "levels", "room", "expected"),
    [
        (4, [0, 0], [9, 9], [2, 2]),
        (5, [0, 0], [9, 9], [3, 2]),
        (5, [3, 0], [9, 9], [1, 4]),
        (5, [0, 0, 0], [1, 9, 9], [1, 2, 2]),
        (0, [2, 0], [0, 3], [0, 0]),
        (3, [2, 0], [0, 3], [0, 3]),
    ],
)
def test_levels_end_as_equal_as_room_allows(
    count: int, levels: list[int], room: list[int], expected: list[int]
) -> None:
    assert spread(count, levels=np.array(levels), room=np.array(room)).tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_everything_is_placed_and_no_room_overrun(
    ranks: list[tuple[int, int]], share: float
) -> None:
    levels, room = (np.array(column) for column in zip(*ranks, strict=True))
    count = round(share * int(room.sum()))
    shares = spread(count, levels=levels, room=room)
    assert shares.sum() == count
    assert ((shares >= 0) & (shares <= room)).all()
    open_ranks, used = shares < room, shares > 0
    if open_ranks.any() and used.any():
        ends = levels + shares
        assert ends[used].max() <= ends[open_ranks].min() + 1


def test_tokens_without_a_rank_fill_what_is_left_and_members_are_spread() -> None:
    rank = np.array([0, NOWHERE, NOWHERE, NOWHERE, NOWHERE, 1])
    full = filled(rank, capacity=np.array([3, 3]), members=np.array([2, 4]))
    assert full[[0, 5]].tolist() == [0, 1]
    assert sorted(full[[2, 4]].tolist()) == [0, 1]
    assert np.bincount(full).tolist() == [3, 3]

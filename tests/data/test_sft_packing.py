"""Bins against textbook placements, which look at every bin."""

import time
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ext.data.sft_packing import Bins, Packing, fill_ratio, pack
from megatron_ext.errors import DataError

CAPACITY = 16
PACKINGS = get_args(Packing)
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)


def packed(lengths, packing, capacity=CAPACITY):
    bins = pack(np.array(lengths, np.int64), capacity, packing)
    return [bins[index].tolist() for index in range(len(bins))]


def by_looking_at_every_bin(lengths, packing):
    """The same placement, in quadratic time."""
    order = list(range(len(lengths)))
    if packing.endswith("decreasing"):
        order.sort(key=lambda index: -lengths[index])
    bins = []
    for index in order:
        room = [CAPACITY - sum(lengths[i] for i in members) for members in bins]
        fits = [b for b, left in enumerate(room) if left >= lengths[index]]
        if packing == "none" or not fits:
            bins.append([index])
        elif packing.startswith("first-fit"):
            bins[fits[0]].append(index)
        else:
            bins[min(fits, key=lambda b: room[b])].append(index)
    return bins


@pytest.mark.parametrize("packing", PACKINGS)
@given(lengths=LENGTHS)
@example(lengths=[])
@example(lengths=[CAPACITY])
@example(lengths=[8, 8, 8, 7, 1, 9, 8])
@settings(max_examples=100, deadline=None)
def test_bins_are_those_of_the_textbook(lengths, packing):
    assert packed(lengths, packing) == by_looking_at_every_bin(lengths, packing)


def test_the_bins_are_shown_in_the_order_in_which_they_were_filled():
    lengths = [3, 9, 7, 9, 4]
    assert packed(lengths, "first-fit-decreasing") == [[1, 2], [3, 4, 0]]
    assert packed(lengths, "best-fit-decreasing") == [[1, 2], [3, 4, 0]]
    assert packed(lengths, "first-fit") == [[0, 1, 4], [2, 3]]
    assert packed([9, 12, 4], "best-fit") == [[0], [1, 2]]
    assert packed([9, 12, 4], "first-fit") == [[0, 2], [1]]
    assert packed([9, 3], "none") == [[0], [1]]


def test_the_fill_ratio_is_the_share_of_the_room_that_is_taken():
    lengths = np.array([8, 8, 8])
    assert fill_ratio(pack(lengths, 16, "first-fit"), lengths, 16) == 0.75
    assert fill_ratio(pack(lengths, 16, "none"), lengths, 16) == 0.5
    assert fill_ratio(Bins(np.zeros(0, np.int64), np.zeros(1, np.int64)), lengths, 16) == 1


@pytest.mark.parametrize("length", [0, 17])
def test_what_fits_no_bin_is_refused(length):
    with pytest.raises(DataError, match=rf"lengths\[1\]: .*got {length} tokens; expected 1 to 16"):
        packed([1, length], "best-fit")


@pytest.mark.parametrize("packing", PACKINGS)
def test_many_conversations_do_not_take_quadratic_time(packing):
    # Of these no two fit together, so that a scan would look at every bin each time.
    lengths = np.full(100_000, 5000)
    start = time.perf_counter()
    assert len(pack(lengths, 8192, packing)) == 100_000
    assert time.perf_counter() - start < 10

"""Bin packing of conversations into samples by length. C conversations, B bins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import DataError

Packing = Literal["none", "first-fit", "first-fit-decreasing", "best-fit", "best-fit-decreasing"]
"""Algorithm that packs conversations.

- ``none``: each is a sample of its own.
- ``first-fit``: each goes, in the given order, into the first bin that has room.
- ``best-fit``: each goes into the fullest bin that has room, the first of several.
- ``first-fit-decreasing``, ``best-fit-decreasing``: the same, the longest first.
"""

Lengths = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Bins:
    """Assignment of every conversation to exactly one of B bins."""

    members: NDArray[np.int64]
    """[C] indices of conversations, bin by bin, each in the order it was filled."""
    offsets: NDArray[np.int64]
    """[B + 1] bounds of the bins in ``members``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """The conversations of one bin."""
        return self.members[self.offsets[index] : self.offsets[index + 1]]


def pack(lengths: Lengths, capacity: int, packing: Packing) -> Bins:
    """Pack conversations into bins, deterministically, in O(C log C + capacity).

    Args:
        lengths: Tokens of each conversation [C].
        capacity: Most tokens of a bin.
        packing: The algorithm.

    Raises:
        DataError: A conversation is empty or longer than a bin.
    """
    for index in np.flatnonzero((lengths < 1) | (lengths > capacity))[:1].tolist():
        raise DataError(
            "the conversation fits no bin",
            got=f"{lengths[index]} tokens",
            expected=f"1 to {capacity}",
            where=f"lengths[{index}]",
        )
    order: NDArray[np.int64] = np.arange(len(lengths))
    if packing.endswith("-decreasing"):
        order = np.argsort(-lengths, kind="stable")
    place = _PLACEMENTS[packing.removesuffix("-decreasing")]
    bin_of = np.array(place(lengths[order].tolist(), capacity), np.int64)
    counts = np.bincount(bin_of)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    return Bins(order[np.argsort(bin_of, kind="stable")], offsets)


def fill_ratio(bins: Bins, lengths: Lengths, capacity: int) -> float:
    """Fraction of the bins' capacity that tokens fill, 0 to 1; 1 without bins."""
    room = len(bins) * capacity
    return float(lengths[bins.members].sum() / room) if room else 1.0


def _one_each(lengths: Sequence[int], capacity: int) -> list[int]:
    return list(range(len(lengths)))


def _first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    # Empty bins exist from the start, so there is always one with room.
    room = _MaxTree([capacity] * len(lengths))
    bin_of = []
    for length in lengths:
        index = room.first_at_least(length)
        assert index is not None
        room.set(index, room.get(index) - length)
        bin_of.append(index)
    return bin_of


def _best_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    # Bins by the room left in them, and a tree of the amounts of room that some bin has.
    bins_with: dict[int, list[int]] = {}
    rooms = _MaxTree([-1] * (capacity + 1))
    bin_of = []
    count = 0
    for length in lengths:
        room = rooms.first_at_least(length)
        if room is None:
            room, index, count = capacity, count, count + 1
        else:
            index = heappop(bins_with[room])
            if not bins_with[room]:
                rooms.set(room, -1)
        left = room - length
        if left:
            heappush(bins_with.setdefault(left, []), index)
            rooms.set(left, left)
        bin_of.append(index)
    return bin_of


_PLACEMENTS: Final[dict[str, Callable[[Sequence[int], int], list[int]]]] = {
    "none": _one_each,
    "first-fit": _first_fit,
    "best-fit": _best_fit,
}
"""Functions of (lengths, capacity) to the bin of each length, in the given order."""


class _MaxTree:
    """Segment tree that finds the first sufficiently large number in O(log n)."""

    def __init__(self, values: Sequence[int]) -> None:
        self._leaves = 1 << max(len(values) - 1, 0).bit_length()
        below_all = min(values, default=0) - 1
        self._largest = [below_all] * (2 * self._leaves)
        self._largest[self._leaves : self._leaves + len(values)] = values
        for node in range(self._leaves - 1, 0, -1):
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])

    def get(self, index: int) -> int:
        return self._largest[self._leaves + index]

    def set(self, index: int, value: int) -> None:
        largest = self._largest
        node = self._leaves + index
        largest[node] = value
        while node > 1:
            value = max(value, largest[node ^ 1])
            node //= 2
            if largest[node] == value:
                return
            largest[node] = value

    def first_at_least(self, value: int) -> int | None:
        """Index of the first number that is at least ``value``; None without one."""
        largest = self._largest
        if largest[1] < value:
            return None
        node = 1
        while node < self._leaves:
            node *= 2
            if largest[node] < value:
                node += 1
        return node - self._leaves

"""Which pieces share a row: first fit, over the lengths of all sides. P pieces, K sides."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_OPEN_ROWS = 64
"""Rows that a piece is tried in; the oldest one is closed for a new one."""


def pack_rows(lengths: NDArray[np.int64], capacities: NDArray[np.int64]) -> list[list[int]]:
    """Put pieces into rows, the longest first; each into the first open row that has room.

    Args:
        lengths: [P, K] positions of each piece on each side.
        capacities: [K] positions of a row; none of ``lengths`` is larger.

    Returns:
        The pieces of each row.
    """
    rows: list[list[int]] = []
    room: NDArray[np.int64] = np.zeros((0, len(capacities)), np.int64)
    first_open = 0
    longest = (lengths / capacities).max(axis=1)
    for index in np.argsort(-longest, kind="stable").tolist():
        fits = (room >= lengths[index]).all(axis=1)
        row = int(fits.argmax()) if fits.any() else -1
        if row < 0:
            rows.append([])
            room = np.concatenate([room, capacities[None]])
            if len(room) > _OPEN_ROWS:
                room, first_open = room[1:], first_open + 1
            row = len(room) - 1
        rows[first_open + row].append(index)
        room[row] -= lengths[index]
    return rows

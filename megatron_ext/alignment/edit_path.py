"""What two rows share by the fewest insertions and deletions, as far as a bound allows.

The greedy algorithm of Myers, "An O(ND) Difference Algorithm and Its Variations" (1986), from the
front in stages: a stage ends at a long run of equal symbols, or where its edits are used up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int, int]

MAX_EDITS = 48
"""Insertions and deletions of one stage."""
LONG_RUN = 16
"""Symbols in a row after which a stage ends: both sides are in step again."""
LEAST_SHARE = 0.6
"""Share of symbols that are equal in a stage that uses its edits up; below it, what is equal is
equal by chance, and the search ends."""


def edit_path(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> Iterator[Run]:
    """Runs (start in the first, start in the second, length) of equal symbols, ascending."""
    # A stage sees no more than it can reach.
    reach = 2 * MAX_EDITS * LONG_RUN
    i = j = 0
    while i < len(first) and j < len(second):
        runs, x, y, is_good = _stage(first[i : i + reach].tolist(), second[j : j + reach].tolist())
        if not is_good:
            return
        for start, other, length in runs:
            yield i + start, j + other, length
        i, j = i + x, j + y


def _stage(first: list[int], second: list[int]) -> tuple[list[Run], int, int, bool]:
    """Runs of one stage, where it ends in both rows, and whether it is worth going on."""
    furthest = {1: 0}
    trace: list[dict[int, int]] = []
    best = (0, 0, 0, 0)
    for edits in range(MAX_EDITS + 1):
        trace.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1]
            )
            x = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            y = x - diagonal
            start = x
            while x < len(first) and y < len(second) and first[x] == second[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            inside = x <= len(first) and y <= len(second)
            if inside and x + y > best[0]:
                best = (x + y, x, y, edits)
            at_end = x >= len(first) and y >= len(second)
            if inside and (at_end or x - start >= LONG_RUN):
                return _runs(trace, x, y, edits), x, y, x + y > 0
    total, x, y, edits = best
    return _runs(trace, x, y, edits), x, y, total > 0 and total - edits >= LEAST_SHARE * total


def _runs(trace: list[dict[int, int]], x: int, y: int, edits: int) -> list[Run]:
    """The equal runs on the way to (x, y)."""
    runs: list[Run] = []
    for edit in range(edits, -1, -1):
        furthest, diagonal = trace[edit], x - y
        down = diagonal == -edit or (
            diagonal != edit and furthest[diagonal - 1] < furthest[diagonal + 1]
        )
        start = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
        if edit == 0:
            start = 0
        if x > start:
            runs.append((start, start - diagonal, x - start))
        if edit:
            x, y = (start, start - diagonal - 1) if down else (start - 1, start - diagonal)
    return runs[::-1]

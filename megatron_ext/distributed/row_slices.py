"""Slices of rows, so that a temporary over a vocabulary stays small. T rows, Vp columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

SLICE_ELEMENTS: Final = 1 << 25
"""Elements of one temporary: 128 MiB in fp32, far above what launching a kernel costs."""


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Cut ``rows`` rows so that each slice holds at most ``SLICE_ELEMENTS`` elements.

    Collectives run once a slice, so ``columns`` must be a width that is equal on every rank:
    ``VocabShard.width``, never ``valid_width``.
    """
    step = max(1, SLICE_ELEMENTS // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

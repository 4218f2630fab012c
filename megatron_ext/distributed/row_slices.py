"""Slices of rows, so that a temporary over a vocabulary stays small. T rows, Vp columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

SLICE_ELEMENTS: Final = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements of one temporary by device type.

128 MiB in fp32 on a GPU, far above what launching a kernel costs. 4 MiB on a CPU: it stays in the
cache, and the allocator hands the same pages out again (twice as fast on the losses as 128 MiB).
"""


def row_slices(rows: int, columns: int, *, device: torch.device) -> Iterator[slice]:
    """Cut ``rows`` rows so that each slice holds at most ``SLICE_ELEMENTS`` elements.

    Collectives run once a slice, so ``columns`` must be a width that is equal on every rank:
    ``VocabShard.width``, never ``valid_width``.
    """
    step = max(1, SLICE_ELEMENTS[device.type] // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

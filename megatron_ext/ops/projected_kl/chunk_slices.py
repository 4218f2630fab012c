"""Slices of whole chunks, so that a temporary over a vocabulary stays small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_ext.distributed.row_slices import SLICE_ELEMENTS
from megatron_ext.ops.chunk_rows import ChunkRows


class ChunkSlice(NamedTuple):
    """Chunks ``[start, stop)`` and places of their rows in ``ChunkRows.order`` on either side."""

    chunks: slice
    student: slice
    teacher: slice


def host_offsets(student: ChunkRows, teacher: ChunkRows) -> list[list[int]]:
    """``ChunkRows.offsets`` of both sides on the host, which waits for the device once."""
    ends: list[list[int]] = torch.stack([student.offsets, teacher.offsets]).tolist()
    return ends


def chunk_slices(
    ends: list[list[int]], widths: tuple[int, int, int], device: torch.device
) -> Iterator[ChunkSlice]:
    """Cut all chunks into slices whose temporaries hold at most ``SLICE_ELEMENTS`` elements.

    Collectives run once a slice: chunks and widths must be the same on every rank. A chunk that
    alone holds more is a slice of its own.

    Args:
        ends: From ``host_offsets``.
        widths: Columns of a student row, a teacher row, and of what a chunk has of its own.
    """
    limit, count = SLICE_ELEMENTS[device.type], len(ends[0]) - 1
    start = 0
    while start < count:
        stop = start + 1
        while stop < count and _largest(ends, start, stop + 1, widths) <= limit:
            stop += 1
        yield ChunkSlice(slice(start, stop), *(slice(side[start], side[stop]) for side in ends))
        start = stop


def _largest(ends: list[list[int]], start: int, stop: int, widths: tuple[int, int, int]) -> int:
    rows = [side[stop] - side[start] for side in ends]
    return max(count * width for count, width in zip((*rows, stop - start), widths, strict=True))

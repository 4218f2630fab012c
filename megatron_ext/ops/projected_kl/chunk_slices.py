"""Slices of whole chunks, so that a temporary over a vocabulary stays small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import SLICE_ELEMENTS
from megatron_ext.ops.chunk_rows import ChunkRows


class ChunkSlice(NamedTuple):
    """Chunks ``[start, stop)`` and places of their rows in ``ChunkRows.order`` on either side."""

    chunks: slice
    student: slice
    teacher: slice
    is_scaled: bool
    """Whether one of the chunks is scaled up (``CarriedRows``)."""


class HostChunks(NamedTuple):
    """What the host has to know of the chunks."""

    student: list[int]
    """[C + 1] ``ChunkRows.offsets``."""

    teacher: list[int]

    scaled: list[int]
    """[C + 1] how many of the chunks before are scaled up."""

    @classmethod
    def of(cls, student: ChunkRows, teacher: ChunkRows, is_scaled: torch.Tensor) -> HostChunks:
        """Waits for the device once."""
        scaled = torch.nn.functional.pad(is_scaled.int().cumsum(0, dtype=torch.int32), (1, 0))
        return cls(*torch.stack([student.offsets, teacher.offsets, scaled]).tolist())


def chunk_slices(
    ends: HostChunks, widths: tuple[int, int, int], device: torch.device
) -> Iterator[ChunkSlice]:
    """Cut all chunks into slices whose temporaries hold at most ``SLICE_ELEMENTS`` elements.

    Collectives run once a slice: chunks and widths must be the same on every rank. A chunk that
    alone holds more is a slice of its own.

    Args:
        ends: Of all chunks.
        widths: Columns of a student row, a teacher row, and of what a chunk has of its own.
    """
    limit, count = SLICE_ELEMENTS[device.type], len(ends.student) - 1
    start = 0
    while start < count:
        stop = start + 1
        while stop < count and _largest(ends, start, stop + 1, widths) <= limit:
            stop += 1
        yield ChunkSlice(
            slice(start, stop),
            slice(ends.student[start], ends.student[stop]),
            slice(ends.teacher[start], ends.teacher[stop]),
            ends.scaled[stop] > ends.scaled[start],
        )
        start = stop


def _largest(ends: HostChunks, start: int, stop: int, widths: tuple[int, int, int]) -> int:
    rows = [side[stop] - side[start] for side in (ends.student, ends.teacher)]
    return max(count * width for count, width in zip((*rows, stop - start), widths, strict=True))

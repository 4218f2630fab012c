"""Cutting a text where every model can be cut. K places, P pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText, Ids

Positions = NDArray[np.int64]


def cut(text: AlignedText, capacities: Sequence[int]) -> list[AlignedText]:
    """The text in order, in as few pieces as possible that fit all models.

    A piece begins where a chunk of every teacher does, so that all models read the same bytes in
    it. What lies between two such places and exceeds a capacity alone is in no piece: the bytes of
    the pieces are then fewer than those of the text.

    Args:
        text: The text.
        capacities: Most tokens of a piece, of the student and of each teacher; at least 1.
    """
    counts = text.token_counts
    if all(count <= capacity for count, capacity in zip(counts, capacities, strict=True)):
        return [text]
    stops = _stops(text)
    pieces = []
    for begin, end in _ranges(stops, capacities):
        starts = [0] * len(stops) if begin == 0 else [int(side[begin - 1]) for side in stops]
        bounds = tuple(
            slice(start, int(side[end - 1])) for start, side in zip(starts, stops, strict=True)
        )
        pieces.append(text.part(bounds, is_end=end == len(stops[0])))
    return pieces


def _ranges(stops: Sequence[Positions], capacities: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of stretches between places that fit, each as long as it can be."""
    count = len(stops[0])
    begin = 0
    starts = [0] * len(stops)
    while begin < count:
        end = min(
            int(side.searchsorted(start + capacity, side="right"))
            for side, start, capacity in zip(stops, starts, capacities, strict=True)
        )
        if end > begin:
            yield begin, end
        begin = max(end, begin + 1)
        starts = [int(side[begin - 1]) for side in stops]


def _stops(text: AlignedText) -> list[Positions]:
    """For the student and each teacher, where a piece may end [K], the end of the text last.

    A token that covers nothing goes with the byte before it, the first ones with the first byte.
    """
    own = np.flatnonzero(text.student_widths[:-1].cumsum()) + 1
    for teacher in text.teachers:
        own = own[np.isin(own, _chunk_starts(teacher.student_chunk_id), assume_unique=True)]
    ends = [np.append(own, len(text.student_ids))]
    for teacher in text.teachers:
        chunks = teacher.student_chunk_id[own]
        ends.append(np.append(_chunk_starts(teacher.teacher_chunk_id)[chunks], len(teacher.ids)))
    return ends


def _chunk_starts(chunk_id: Ids) -> Positions:
    """First token of each chunk [C]."""
    inside = np.flatnonzero(chunk_id != NO_CHUNK)
    return inside[np.diff(chunk_id[inside], prepend=NO_CHUNK) > 0]

"""Chunks of two streams of which only some ranges correspond. T tokens, R ranges, C chunks.

Both sides are mapped to shared coordinates in which corresponding ranges fall together and all else
falls between them; there, a chunk is what it is for equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.byte_alignment import ByteEnds, Indices, align_byte_ends
from megatron_ext.constants import NO_CHUNK

Ranges = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Ranges of bytes that stand for the same on both sides, in order and apart on either."""

    student: Ranges
    """[R, 2] half-open."""

    teacher: Ranges
    """[R, 2] Of the same length, the range is byte for byte the student's; of another length, it
    corresponds as a whole alone."""

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Start in the student's bytes, start in the teacher's, and length of each."""
        starts = zip(self.student.tolist(), self.teacher[:, 0].tolist(), strict=True)
        return [(start, other, stop - start) for (start, stop), other in starts]

    def joined(self) -> Segments:
        """The same with ranges that touch on both sides as one."""
        keeps_length = np.diff(self.student)[:, 0] == np.diff(self.teacher)[:, 0]
        touches = (self.student[1:, 0] == self.student[:-1, 1]) & (
            self.teacher[1:, 0] == self.teacher[:-1, 1]
        )
        touches &= keeps_length[1:] & keeps_length[:-1]
        starts = np.flatnonzero(np.append(True, ~touches)[: len(self.student)])
        stops = np.append(starts[1:], len(self.student)) - 1
        return Segments(
            *(
                np.stack([side[starts, 0], side[stops[: len(starts)], 1]], axis=1)
                for side in (self.student, self.teacher)
            )
        )


def align_segments(student_ends: ByteEnds, teacher_ends: ByteEnds, segments: Segments) -> Alignment:
    """Minimal chunks within corresponding ranges.

    A token that is not wholly inside a range, and one whose chunk would hold such a token, is in no
    chunk; neither is one that covers no byte.

    Args:
        student_ends: [Ts] checked byte ends in the student's bytes.
        teacher_ends: [Tt] in the teacher's.
        segments: What corresponds.
    """
    segments = segments.joined()
    lengths = np.diff(segments.student)[:, 0]
    is_whole = lengths != np.diff(segments.teacher)[:, 0]
    lengths[is_whole] = 1
    # One place between neighbours, which keeps the end of one from the start of the next.
    bases = np.cumsum(lengths + 1) - lengths
    total = int(bases[-1] + lengths[-1]) + 1 if len(bases) else 1
    student = _shared(student_ends, segments.student, bases, is_whole, total)
    teacher = _shared(teacher_ends, segments.teacher, bases, is_whole, total)
    alignment = align_byte_ends(student.ends, teacher.ends)
    dropped = np.zeros(alignment.chunk_count, dtype=np.bool_)
    dropped[np.delete(alignment.student_chunk_id, student.place)] = True
    dropped[np.delete(alignment.teacher_chunk_id, teacher.place)] = True
    renumbered = np.where(dropped, NO_CHUNK, np.cumsum(~dropped) - 1).astype(np.int32)
    count = int(np.count_nonzero(~dropped))
    student_chunk_id = np.full(len(student_ends), NO_CHUNK, dtype=np.int32)
    student_chunk_id[student.token] = renumbered[alignment.student_chunk_id[student.place]]
    teacher_chunk_id = np.full(len(teacher_ends), NO_CHUNK, dtype=np.int32)
    teacher_chunk_id[teacher.token] = renumbered[alignment.teacher_chunk_id[teacher.place]]
    return Alignment(
        student_spans=spans_of(student_chunk_id, count),
        teacher_spans=spans_of(teacher_chunk_id, count),
        is_exact=np.ones(count, dtype=np.bool_),
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
    )


class _Shared(NamedTuple):
    """One side in shared coordinates: tokens inside ranges, and fillers for all else."""

    ends: ByteEnds
    """[tokens and fillers]"""

    token: Indices
    """Tokens that are inside a range."""

    place: Indices
    """Where each of these is among the ends."""


def _shared(
    ends: ByteEnds,
    ranges: Ranges,
    bases: NDArray[np.int64],
    is_whole: NDArray[np.bool_],
    total: int,
) -> _Shared:
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])[: len(ends)]
    nearest = ranges[:, 0].searchsorted(begins, side="right") - 1
    inside = (nearest >= 0) & (ends > begins)
    inside[inside] = ends[inside] <= ranges[nearest[inside], 1]
    as_whole = inside.copy()
    as_whole[inside] = is_whole[nearest[inside]]
    fits = (begins == ranges[nearest, 0]) & (ends == ranges[nearest, 1]) if len(ranges) else inside
    inside &= ~as_whole | fits
    token = np.flatnonzero(inside)
    nearest, as_whole = nearest[token], as_whole[token]
    start = bases[nearest] + begins[token] - ranges[nearest, 0]
    stop = np.where(as_whole, start + 1, start + ends[token] - begins[token])
    # A filler stands before each token that does not start where the one before it stops.
    is_behind = start > np.concatenate([np.zeros(1, dtype=np.int64), stop[:-1]])[: len(stop)]
    place = np.arange(len(token)) + np.cumsum(is_behind)
    shared = np.empty(len(token) + int(is_behind.sum()) + 1, dtype=np.int64)
    shared[place] = stop
    shared[place[is_behind] - 1] = start[is_behind]
    shared[-1] = total
    return _Shared(shared, token, place)


def spans_of(chunk_id: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """First token and one past the last [C, 2] of each chunk."""
    spans = np.empty((count, 2), dtype=np.int32)
    inside = np.flatnonzero(chunk_id != NO_CHUNK)
    spans[chunk_id[inside[::-1]], 0] = inside[::-1]
    spans[chunk_id[inside], 1] = inside + 1
    return spans

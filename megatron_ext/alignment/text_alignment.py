"""Alignment of two streams whose texts differ a little. T tokens, R ranges, C chunks, N bytes.

Tokenizers that normalise (compose accents, fold case, drop characters) decode to different bytes.
Chunks are made within the ranges of equal characters; unaligned spans are in no chunk and are
reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment, spans_of
from megatron_ext.alignment.byte_alignment import ByteEnds, Indices, align_byte_ends
from megatron_ext.alignment.control_pairs import ControlClasses
from megatron_ext.alignment.spelling import Tokens
from megatron_ext.alignment.symbol_match import Run, SymbolRow, match_symbols
from megatron_ext.constants import NO_CHUNK

Ranges = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Corresponding ranges of bytes, ascending and disjoint on both sides."""

    student: Ranges
    """[R, 2] half-open."""

    teacher: Ranges
    """[R, 2] A range of the same length equals the student's byte for byte; one of another length
    corresponds only as a whole."""

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Start in the student's bytes, start in the teacher's, and length of each."""
        starts = zip(self.student.tolist(), self.teacher[:, 0].tolist(), strict=True)
        return [(start, other, stop - start) for (start, stop), other in starts]

    def joined(self) -> Segments:
        """The segments with ranges that touch on both sides merged."""
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
        segments: The corresponding ranges.
    """
    segments = segments.joined()
    lengths = np.diff(segments.student)[:, 0]
    is_whole = lengths != np.diff(segments.teacher)[:, 0]
    lengths[is_whole] = 1
    # One position between neighbours separates the end of one from the start of the next.
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
    """One side in shared coordinates: tokens inside ranges, and fillers elsewhere."""

    ends: ByteEnds
    """[tokens and fillers]"""

    token: Indices
    """Indices of the tokens that are inside a range."""

    place: Indices
    """Index of each of these tokens in ``ends``."""


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


@dataclass(frozen=True, slots=True)
class TextBridge:
    """Equal ranges and unaligned spans of two texts."""

    equal: Segments
    """R ranges of whole characters that are equal, in order."""

    student_bytes: int
    """N of the student's text."""

    teacher_bytes: int

    @property
    def student_residual_bytes(self) -> int:
        """Bytes of the student's unaligned spans."""
        return self.student_bytes - int(np.diff(self.equal.student).sum())

    @property
    def teacher_residual_bytes(self) -> int:
        """Bytes of the teacher's unaligned spans."""
        return self.teacher_bytes - int(np.diff(self.equal.teacher).sum())

    @property
    def differences(self) -> Segments:
        """The unaligned spans of both sides, in order; a span can be empty on one side."""
        student = _between(self.equal.student, self.student_bytes)
        teacher = _between(self.equal.teacher, self.teacher_bytes)
        differs = (np.diff(student)[:, 0] > 0) | (np.diff(teacher)[:, 0] > 0)
        return Segments(student[differs], teacher[differs])


@dataclass(frozen=True)
class BridgedAlignment(Alignment):
    """An alignment of streams that decode to different bytes."""

    bridge: TextBridge
    """The equal ranges and unaligned spans."""


def bridge_texts(student: bytes, teacher: bytes) -> TextBridge:
    """The equal ranges of two texts, in whole characters."""
    rows = SymbolRow.of(student), SymbolRow.of(teacher)
    return _bridge(*rows, match_symbols(rows[0].values, rows[1].values))


def align_bridged(
    student: Tokens,
    teacher: Tokens,
    student_bytes: bytes,
    teacher_bytes: bytes,
    classes: ControlClasses | None = None,
) -> BridgedAlignment:
    """Align two streams of different bytes within their equal ranges.

    Args:
        student: Tokens and their ends in ``student_bytes``.
        teacher: Tokens and their ends in ``teacher_bytes``.
        student_bytes: Bytes that the student's tokens decode to.
        teacher_bytes: Bytes that the teacher's tokens decode to.
        classes: Control tokens of one class are chunks where they stand between the same
            characters. None leaves all of them out.
    """
    student_row, teacher_row = SymbolRow.of(student_bytes), SymbolRow.of(teacher_bytes)
    student_ends, teacher_ends = student.ends, teacher.ends
    if classes is not None:
        student_row, student_ends = student_row.with_control(student, classes.student)
        teacher_row, teacher_ends = teacher_row.with_control(teacher, classes.teacher)
    runs = match_symbols(student_row.values, teacher_row.values)
    alignment = align_segments(
        student_ends,
        teacher_ends,
        Segments(
            student_row.ranges(runs, 0, control_width=1),
            teacher_row.ranges(runs, 1, control_width=1),
        ),
    )
    return BridgedAlignment(
        student_spans=alignment.student_spans,
        teacher_spans=alignment.teacher_spans,
        is_exact=alignment.is_exact,
        student_chunk_id=alignment.student_chunk_id,
        teacher_chunk_id=alignment.teacher_chunk_id,
        bridge=_bridge(student_row, teacher_row, runs),
    )


def _bridge(student: SymbolRow, teacher: SymbolRow, runs: Sequence[Run]) -> TextBridge:
    ranges = Segments(student.ranges(runs, 0), teacher.ranges(runs, 1))
    has_bytes = np.diff(ranges.student)[:, 0] > 0
    equal = Segments(ranges.student[has_bytes], ranges.teacher[has_bytes]).joined()
    return TextBridge(equal, student.byte_count, teacher.byte_count)


def _between(ranges: Ranges, total: int) -> Ranges:
    """[R + 1, 2] the ranges before, between and behind ``ranges``."""
    bounds = np.concatenate([np.zeros(1, np.int64), ranges.reshape(-1), np.array([total])])
    pairs: Ranges = bounds.reshape(-1, 2)
    return pairs

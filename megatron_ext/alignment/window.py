"""Windows of a text that fit both models, and truncation to them. T tokens, C chunks, W windows.

A window starts and ends on a common byte boundary, so that teacher and student read exactly the
same bytes in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.byte_alignment import (
    ByteEnds,
    Indices,
    check_byte_ends,
    common_boundaries,
)
from megatron_ext.alignment.spelling import AlignedTokens
from megatron_ext.errors import AlignmentError


@dataclass(frozen=True, slots=True)
class Windows:
    """Half-open ranges of one text. Windows and dropped ranges cover every byte exactly once."""

    student_bounds: NDArray[np.int64]
    """[W, 2] first student token and one past the last."""

    teacher_bounds: NDArray[np.int64]
    """[W, 2]; equal to ``student_bounds`` where there is no teacher."""

    byte_bounds: NDArray[np.int64]
    """[W, 2]"""

    dropped_byte_bounds: NDArray[np.int64]
    """[D, 2] bytes in no window: chunks longer than a budget, bytes that one side lacks."""

    @property
    def count(self) -> int:
        """W."""
        return len(self.byte_bounds)

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes in no window."""
        return int((self.dropped_byte_bounds[:, 1] - self.dropped_byte_bounds[:, 0]).sum())


def cut_windows(
    student_ends: ByteEnds,
    teacher_ends: ByteEnds | None = None,
    *,
    student_length: int,
    teacher_length: int | None = None,
) -> Windows:
    """Greedy windows: each takes as many chunks as fit both budgets.

    A token that covers no byte (BOS, a dummy prefix) counts towards its budget. It goes into the
    window of the byte that follows it, and one after the last byte (EOS) into the last window. A
    chunk that with its zero-width tokens exceeds a budget alone is dropped, and so are bytes past
    the last common boundary; both are in ``dropped_byte_bounds``.

    Args:
        student_ends: [Ts] int64, where each token ends in the bytes, non-decreasing.
        teacher_ends: [Tt] int64, or None to cut the student's tokens alone.
        student_length: Most student tokens in a window.
        teacher_length: Most teacher tokens in a window; ``student_length`` unless given.

    Raises:
        AlignmentError: A budget below one token, or ends that go backwards.
    """
    teacher_length = student_length if teacher_length is None else teacher_length
    for side, length in (("student", student_length), ("teacher", teacher_length)):
        _check_length(length, side=side)
    student_ends, student_covers = check_byte_ends(student_ends, side="student")
    if teacher_ends is None:
        teacher_ends, teacher_covers = student_ends, student_covers
        teacher_length = student_length
    else:
        teacher_ends, teacher_covers = check_byte_ends(teacher_ends, side="teacher")
    student_is_common, teacher_is_common = common_boundaries(student_ends, teacher_ends)
    student_last = np.flatnonzero(student_is_common[1:] & student_covers)
    teacher_last = np.flatnonzero(teacher_is_common[1:] & teacher_covers)
    byte_stops = student_ends[student_last]
    student_stops = _chunk_stops(student_ends, student_last)
    teacher_stops = _chunk_stops(teacher_ends, teacher_last)

    edges, is_window = fitting_runs(
        (student_stops, teacher_stops), (student_length, teacher_length)
    )
    byte_bounds = _bounds(byte_stops, edges)
    covered = int(byte_stops[-1]) if len(byte_stops) else 0
    total = max((int(ends[-1]) for ends in (student_ends, teacher_ends) if len(ends)), default=0)
    dropped = byte_bounds[~is_window]
    if covered < total:
        dropped = np.concatenate([dropped, np.array([[covered, total]], dtype=np.int64)])
    return Windows(
        student_bounds=_bounds(student_stops, edges)[is_window],
        teacher_bounds=_bounds(teacher_stops, edges)[is_window],
        byte_bounds=byte_bounds[is_window],
        dropped_byte_bounds=dropped,
    )


def fitting_runs(
    stops: Sequence[NDArray[np.int64]], lengths: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Runs of chunks, each as long as fits on all K sides; a chunk too long is a run of its own.

    Args:
        stops: K sides; [C] one past the last token of each chunk, ascending.
        lengths: K numbers of tokens that fit.

    Returns:
        Chunk indices where runs start and stop [R + 1], and the mask of runs that fit [R].
    """
    edges, fits = [0], []
    starts = [0] * len(stops)
    while edges[-1] < len(stops[0]):
        first = edges[-1]
        stop = min(
            int(side.searchsorted(start + length, side="right"))
            for side, start, length in zip(stops, starts, lengths, strict=True)
        )
        fits.append(stop > first)
        edges.append(max(stop, first + 1))
        starts = [int(side[edges[-1] - 1]) for side in stops]
    return np.array(edges, dtype=np.int64), np.array(fits, dtype=np.bool_)


def _chunk_stops(ends: ByteEnds, last_tokens: Indices) -> NDArray[np.int64]:
    """One past the last token of each chunk [C]; after the last byte, the tokens behind it too."""
    stops = last_tokens.astype(np.int64) + 1
    if len(stops) and ends[last_tokens[-1]] == ends[-1]:
        stops[-1] = len(ends)
    return stops


def _bounds(stops: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Start and stop of each range [R, 2], from the stop of each chunk [C]."""
    fence = np.concatenate([np.zeros(1, dtype=np.int64), stops])[edges]
    return np.stack([fence[:-1], fence[1:]], axis=1)


def truncate(
    aligned: AlignedTokens,
    *,
    student_length: int | None = None,
    teacher_length: int | None = None,
) -> AlignedTokens:
    """The first chunks of a text, as many as fit both lengths; both sides end with the same byte.

    Tokens before the first byte (BOS) are kept. Tokens behind the last (EOS) are kept only with the
    whole text, as far as they fit: a text that is cut does not end there. Bytes behind the last
    common boundary, which one side alone has, are cut too.

    Args:
        aligned: Tokens of both sides, and their alignment.
        student_length: Most student tokens; None for any number.
        teacher_length: Most teacher tokens.

    Raises:
        AlignmentError: A length below 1.
    """
    student, teacher, alignment = aligned
    _check_length(student_length, side="student")
    _check_length(teacher_length, side="teacher")
    lengths = (
        len(student.ids) if student_length is None else student_length,
        len(teacher.ids) if teacher_length is None else teacher_length,
    )
    count = min(
        int(alignment.student_spans[:, 1].searchsorted(lengths[0], side="right")),
        int(alignment.teacher_spans[:, 1].searchsorted(lengths[1], side="right")),
    )
    is_whole = count == alignment.chunk_count and _last(student.ends) == _last(teacher.ends)
    if is_whole:
        counts = len(student.ids), len(teacher.ids)
    elif count:
        counts = (
            int(alignment.student_spans[count - 1, 1]),
            int(alignment.teacher_spans[count - 1, 1]),
        )
    else:
        counts = _leading(student.ends), _leading(teacher.ends)
    counts = min(counts[0], lengths[0]), min(counts[1], lengths[1])
    return AlignedTokens(
        student.head(counts[0]),
        teacher.head(counts[1]),
        Alignment(
            student_spans=alignment.student_spans[:count],
            teacher_spans=alignment.teacher_spans[:count],
            is_exact=alignment.is_exact[:count],
            student_chunk_id=alignment.student_chunk_id[: counts[0]],
            teacher_chunk_id=alignment.teacher_chunk_id[: counts[1]],
        ),
    )


def _check_length(length: int | None, *, side: str) -> None:
    if length is not None and length < 1:
        raise AlignmentError(
            f"{side}_length holds no token", got=length, expected="at least 1 token"
        )


def _last(ends: ByteEnds) -> int:
    return int(ends[-1]) if len(ends) else 0


def _leading(ends: ByteEnds) -> int:
    """Number of tokens before the first byte."""
    return int(ends.searchsorted(0, side="right"))

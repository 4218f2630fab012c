"""Alignment of two tokenizations by the byte at which each token ends. T tokens, C chunks.

Both sides tokenize one byte string, so a token boundary is a number: where the token ends in those
bytes. A boundary that both sides have is common, and a chunk lies between two neighbouring common
boundaries. That is exact for every script and every pair of libraries, and takes linear time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError

ByteEnds = NDArray[np.int64]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]

BLOCK_TOKENS = 32_768
"""Tokens processed at a time, so that temporaries stay in the processor's cache.

At a million tokens, whole-sequence temporaries cost more in fresh pages and cache misses than the
work on them."""


def align_byte_ends(
    student_ends: ByteEnds,
    teacher_ends: ByteEnds,
    *,
    paired: tuple[Indices, Indices] | None = None,
) -> Alignment:
    """Minimal chunks of two tokenizations of the same bytes.

    A token that covers no byte (a control token, a dummy prefix) repeats the end before it. It is
    in no chunk: its chunk id is ``NO_CHUNK``, no span starts or ends with it, and where it stands
    between two tokens of one chunk the span runs over it without the id being in the chunk.

    Two tokens without bytes that have the same meaning can be ``paired``; they are then a chunk of
    their own.

    Where one side ends earlier, as after truncation, the tokens past the last common boundary are
    in no chunk.

    Args:
        student_ends: [Ts] int64, where each token ends in the bytes, non-decreasing.
        teacher_ends: [Tt] int64
        paired: Ascending indices [P] of student tokens and [P] of teacher tokens, each pair
            covering no byte at the same byte, as ``ControlClasses.pair`` finds them.

    Returns:
        The alignment; every chunk is exact, because both spans are the same bytes.

    Raises:
        AlignmentError: Ends that are not a non-decreasing row of byte positions.
    """
    if paired is not None and len(paired[0]):
        student_ends = _with_a_byte(student_ends, paired[0])
        teacher_ends = _with_a_byte(teacher_ends, paired[1])
    student_ends, student_covers = check_byte_ends(student_ends, side="student")
    teacher_ends, teacher_covers = check_byte_ends(teacher_ends, side="teacher")
    student_stop, teacher_stop = _padding_start(student_ends), _padding_start(teacher_ends)
    student_is_common, teacher_is_common = common_boundaries(
        student_ends[:student_stop], teacher_ends[:teacher_stop]
    )
    student_spans, student_chunk_id = _chunks(student_is_common, student_covers)
    teacher_spans, teacher_chunk_id = _chunks(teacher_is_common, teacher_covers)
    return Alignment(
        student_spans=student_spans,
        teacher_spans=teacher_spans,
        is_exact=np.ones(len(student_spans), dtype=np.bool_),
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
    )


def common_boundaries(student_ends: ByteEnds, teacher_ends: ByteEnds) -> tuple[Mask, Mask]:
    """Masks of the boundaries of each side that the other side has too.

    It sets one mark per byte instead of merging, without a sort and with binary searches only for
    the ends of blocks: it is linear, and several times faster than ``searchsorted`` or
    ``intersect1d``.

    Args:
        student_ends: [Ts] byte ends as ``check_byte_ends`` returns them.
        teacher_ends: [Tt]

    Returns:
        [Ts + 1] and [Tt + 1]: boundary 0 is byte 0, where both sides start, and boundary ``t + 1``
        is the end of token ``t``.
    """
    student_is_common = np.ones(len(student_ends) + 1, dtype=np.bool_)
    teacher_is_common = np.ones(len(teacher_ends) + 1, dtype=np.bool_)
    first_byte = student_first = teacher_first = 0
    for last_byte, student_stop, teacher_stop in _blocks(student_ends, teacher_ends):
        student = student_ends[student_first:student_stop] - first_byte
        teacher = teacher_ends[teacher_first:teacher_stop] - first_byte
        marks = np.empty(last_byte - first_byte + 1, dtype=np.bool_)
        student_is_common[student_first + 1 : student_stop + 1] = _occur(student, teacher, marks)
        teacher_is_common[teacher_first + 1 : teacher_stop + 1] = _occur(teacher, student, marks)
        first_byte, student_first, teacher_first = last_byte, student_stop, teacher_stop
    return student_is_common, teacher_is_common


def check_byte_ends(ends: ByteEnds, *, side: str) -> tuple[ByteEnds, Mask]:
    """``ends`` as int64 [T], and the mask of tokens that cover at least one byte [T].

    Raises:
        AlignmentError: Not one row of integers, or an end that is negative or before its
            predecessor.
    """
    array = np.asarray(ends)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise AlignmentError(
            f"{side} byte ends are not a row of integers",
            got=f"shape {array.shape} of {array.dtype}",
            expected="shape [T] of int64",
            fix="pass the ends that encode_with_byte_ends or byte_ends returns",
        )
    array = array.astype(np.int64, copy=False)
    covers = np.empty(len(array), dtype=np.bool_)
    covers[:1] = array[:1] > 0
    np.greater(array[1:], array[:-1], out=covers[1:])
    if not covers.all():
        _refuse_falling(array, side)
    return array, covers


def _with_a_byte(ends: ByteEnds, at: Indices) -> ByteEnds:
    """``ends`` with each token ``at`` one byte longer.

    The n-th pair is behind n - 1 others on either side, so that both get the same byte.
    """
    lengthened = np.zeros(len(ends), dtype=np.int64)
    lengthened[at] = 1
    np.cumsum(lengthened, out=lengthened)
    lengthened += ends
    return lengthened


def _refuse_falling(ends: ByteEnds, side: str) -> None:
    falls = ends[1:] < ends[:-1]
    if ends[0] < 0 or falls.any():
        index = 0 if ends[0] < 0 else int(np.argmax(falls)) + 1
        raise AlignmentError(
            f"{side} byte ends go backwards at token {index}",
            got=int(ends[index]),
            expected=f"at least {0 if index == 0 else int(ends[index - 1])}",
            fix="pass cumulative ends, not the byte length of each token",
        )


def _padding_start(ends: ByteEnds) -> int:
    """Index one past the token that reaches the last byte: no chunk goes further."""
    return int(ends.searchsorted(ends[-1])) + 1 if len(ends) else 0


def _blocks(student_ends: ByteEnds, teacher_ends: ByteEnds) -> list[tuple[int, int, int]]:
    """Last byte and one past the last token of each side, for blocks cut at the same bytes.

    No side has more than ``BLOCK_TOKENS`` tokens in a block, not counting those without bytes.
    """
    last_bytes = {int(ends[-1]) for ends in (student_ends, teacher_ends) if len(ends)}
    for ends in (student_ends, teacher_ends):
        last_bytes.update(ends[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].tolist())
    fence = sorted(last_bytes)
    student_stops = student_ends.searchsorted(fence, side="right").tolist()
    teacher_stops = teacher_ends.searchsorted(fence, side="right").tolist()
    return list(zip(fence, student_stops, teacher_stops, strict=True))


def _occur(ends: ByteEnds, other_ends: ByteEnds, marks: Mask) -> Mask:
    """Mask of ``ends`` that are 0 or in ``other_ends``; overwrites ``marks`` [last byte + 1]."""
    marks.fill(False)
    marks[0] = True
    marks[other_ends] = True
    occur: Mask = marks[ends]
    return occur


def _chunks(is_common: Mask, covers: Mask) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Spans [C, 2] and chunk ids [T] of one side, from its boundaries up to the padding.

    Of the tokens that cover bytes, one behind a common boundary starts a chunk and one before a
    common boundary ends it. The chunk id of each is the number of starts up to it, less 1.
    """
    # Boundary 0 ends no chunk: its row is for a last start without an end.
    spans: NDArray[np.int32] = np.empty((np.count_nonzero(is_common), 2), dtype=np.int32)
    spans[0, 0] = 0
    chunk_id = np.empty(len(covers), dtype=np.int32)
    covers = covers[: len(is_common) - 1]
    all_cover = bool(covers.all())
    started = ended = 0
    for first in range(0, len(covers), BLOCK_TOKENS):
        block_covers = covers[first : first + BLOCK_TOKENS]
        stop = first + len(block_covers)
        is_start = is_common[first:stop] & block_covers
        block_ids = chunk_id[first:stop]
        np.cumsum(is_start, out=block_ids)
        block_ids += started - 1
        stops = (is_common[first + 1 : stop + 1] & block_covers).nonzero()[0]
        stops += first + 1
        spans[ended : ended + len(stops), 1] = stops
        if all_cover:
            # Each chunk starts where the one before it stops.
            spans[ended + 1 : ended + 1 + len(stops), 0] = stops
        else:
            starts = is_start.nonzero()[0]
            starts += first
            spans[started : started + len(starts), 0] = starts
        ended += len(stops)
        started = int(block_ids[-1]) + 1
        if not all_cover:
            block_ids[~block_covers] = NO_CHUNK
    spans = spans[:ended]
    chunk_id[spans[-1, 1] if ended else 0 :] = NO_CHUNK
    return spans, chunk_id

"""Byte ends of two tokenizations to the alignment of their tokens. T tokens, C chunks.

Both sides tokenize one byte string, so a token boundary is a number: where the token ends in those
bytes. A boundary that both sides have is common, and a chunk is what lies between one common
boundary and the next. That is exact for every script and every pair of libraries, and linear.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError

ByteEnds = NDArray[np.int64]
Indices = NDArray[np.intp]


def align_byte_ends(student_ends: ByteEnds, teacher_ends: ByteEnds) -> Alignment:
    """Minimal chunks of two tokenizations of the same bytes.

    A token that covers no byte (a control token, a dummy prefix) repeats the end before it. It is
    in no chunk: its chunk id is ``NO_CHUNK``, no span starts or ends with it, and where it stands
    between two tokens of one chunk the span runs over it without the id being in the chunk.

    Where one side ends earlier, as after a truncation, chunks go to the last common boundary and
    the tokens past it are in no chunk.

    Args:
        student_ends: [Ts] int64, where each token ends in the bytes, non-decreasing.
        teacher_ends: [Tt] int64

    Returns:
        The alignment; every chunk is exact, because both spans are the same bytes.

    Raises:
        AlignmentError: Ends that are not a non-decreasing row of byte positions.
    """
    student_ends = check_byte_ends(student_ends, side="student")
    teacher_ends = check_byte_ends(teacher_ends, side="teacher")
    student_wide = wide_tokens(student_ends)
    teacher_wide = wide_tokens(teacher_ends)
    student_cuts, teacher_cuts = common_boundaries(
        _take(student_ends, student_wide), _take(teacher_ends, teacher_wide)
    )
    student_spans, student_chunk_id = _spans(student_cuts, student_wide, len(student_ends))
    teacher_spans, teacher_chunk_id = _spans(teacher_cuts, teacher_wide, len(teacher_ends))
    return Alignment(
        student_spans=student_spans,
        teacher_spans=teacher_spans,
        is_exact=np.ones(len(student_spans), dtype=np.bool_),
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
    )


def common_boundaries(student_ends: ByteEnds, teacher_ends: ByteEnds) -> tuple[Indices, Indices]:
    """Where two strictly increasing rows of positive ends agree.

    One mark per byte instead of a merge: no sort and no binary search, so it is linear, and faster
    than ``searchsorted`` (threefold) or ``intersect1d`` (fivefold) on 4,096 tokens.

    Returns:
        Student indices [C] and teacher indices [C] of the equal ends, ascending.
    """
    if not len(student_ends) or not len(teacher_ends):
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
    size = int(max(student_ends[-1], teacher_ends[-1])) + 1
    student_marks = np.zeros(size, dtype=np.bool_)
    student_marks[student_ends] = True
    teacher_marks = np.zeros(size, dtype=np.bool_)
    teacher_marks[teacher_ends] = True
    return (
        np.flatnonzero(teacher_marks[student_ends]),
        np.flatnonzero(student_marks[teacher_ends]),
    )


def wide_tokens(ends: ByteEnds) -> Indices | None:
    """Indices of the tokens that cover at least one byte, or None where every token does."""
    if not len(ends):
        return None
    wide = np.empty(len(ends), dtype=np.bool_)
    wide[0] = ends[0] > 0
    np.greater(ends[1:], ends[:-1], out=wide[1:])
    return None if wide.all() else np.flatnonzero(wide)


def check_byte_ends(ends: ByteEnds, *, side: str) -> ByteEnds:
    """``ends`` as int64.

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
    falls = array[1:] < array[:-1]
    if falls.any() or (array.size and array[0] < 0):
        index = 0 if array[0] < 0 else int(np.argmax(falls)) + 1
        raise AlignmentError(
            f"{side} byte ends go backwards at token {index}",
            got=int(array[index]),
            expected=f"at least {0 if index == 0 else int(array[index - 1])}",
            fix="pass cumulative ends, not the byte length of each token",
        )
    return array


def _take(ends: ByteEnds, wide: Indices | None) -> ByteEnds:
    return ends if wide is None else ends[wide]


def _spans(
    cuts: Indices, wide: Indices | None, token_count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Spans [C, 2] and chunk ids [T] of one side, from the last wide token of each chunk [C]."""
    spans = np.empty((len(cuts), 2), dtype=np.int32)
    spans[:1, 0] = 0
    spans[:, 1] = cuts
    spans[:, 1] += 1
    spans[1:, 0] = spans[:-1, 1]
    if wide is None:
        return spans, _chunk_ids(cuts, token_count)
    chunk_id = np.full(token_count, NO_CHUNK, dtype=np.int32)
    chunk_id[wide] = _chunk_ids(cuts, len(wide))
    spans[:, 0] = wide[spans[:, 0]]
    spans[:, 1] = wide[cuts] + 1
    return spans, chunk_id


def _chunk_ids(cuts: Indices, token_count: int) -> NDArray[np.int32]:
    """Chunk of each wide token: how many chunks end before it."""
    chunk_id = np.full(token_count, NO_CHUNK, dtype=np.int32)
    if len(cuts):
        inside = int(cuts[-1]) + 1
        is_last = np.zeros(inside, dtype=np.bool_)
        is_last[cuts] = True
        chunk_id[0] = 0
        np.cumsum(is_last[:-1], dtype=np.int32, out=chunk_id[1:inside])
    return chunk_id

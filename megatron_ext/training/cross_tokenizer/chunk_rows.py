"""Chunks of all segments of a batch, in label coordinates. B rows, T label positions, L labels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.training.cross_tokenizer.aligned_text import AlignedText, Ids
from megatron_ext.training.cross_tokenizer.layout import Layout
from megatron_ext.training.cross_tokenizer.side import Side


def alignment_batch(
    pieces: Iterable[AlignedText],
    teacher_index: int,
    *,
    sides: tuple[Side, Side],
    layouts: tuple[Layout, Layout],
) -> AlignmentBatch:
    """The alignment of the student's rows with a teacher's.

    Where both sides end a text with their end-of-document token, the two are a chunk. A chunk of
    which a side does not predict a token, because no token leads, is dropped on both.

    Args:
        pieces: All segments, row after row.
        teacher_index: Among the teachers that have another tokenizer than the student.
        sides: The student and the teacher.
        layouts: Theirs.
    """
    student_side, teacher_side = sides
    pairs_ends = student_side.eod is not None and teacher_side.eod is not None
    student_rows: list[Ids] = [np.zeros(0, np.int32)]
    teacher_rows: list[Ids] = [np.zeros(0, np.int32)]
    count = 0
    for piece in pieces:
        teacher = piece.teachers[teacher_index]
        student_ids, teacher_ids = teacher.student_chunk_id, teacher.teacher_chunk_id
        if _loses_first(student_ids, student_side) or _loses_first(teacher_ids, teacher_side):
            student_ids, teacher_ids = _without_first(student_ids), _without_first(teacher_ids)
        end = int(student_ids.max(initial=NO_CHUNK)) + 1
        has_pair = piece.is_end and pairs_ends
        student_rows.append(_labels(student_ids, student_side, piece.is_end, count, end, has_pair))
        teacher_rows.append(_labels(teacher_ids, teacher_side, piece.is_end, count, end, has_pair))
        count += end + has_pair
    return AlignmentBatch.from_chunk_ids(
        torch.from_numpy(layouts[0].scattered(np.concatenate(student_rows), NO_CHUNK)),
        torch.from_numpy(layouts[1].scattered(np.concatenate(teacher_rows), NO_CHUNK)),
    )


def identity_batch(labels: torch.Tensor) -> AlignmentBatch:
    """The alignment with a teacher of the same tokenizer: each label [B, T] is a chunk."""
    is_label = (labels != IGNORE_INDEX).flatten()
    counted = is_label.cumsum(0)
    chunk_id = torch.where(is_label, counted - 1, NO_CHUNK).view(labels.shape)
    return AlignmentBatch.from_chunk_ids(chunk_id, chunk_id)


def _loses_first(chunk_id: Ids, side: Side) -> bool:
    """Whether the first token of a piece is in a chunk and is not predicted."""
    return side.lead is None and len(chunk_id) > 0 and chunk_id[0] != NO_CHUNK


def _without_first(chunk_id: Ids) -> Ids:
    """Chunk ids without chunk 0, the others counted from there."""
    counted: Ids = np.maximum(chunk_id - np.int32(1), np.int32(NO_CHUNK))
    return counted


def _labels(
    chunk_id: Ids, side: Side, is_end: bool, count: int, end: int, has_pair: bool
) -> NDArray[np.int32]:
    """Chunk of each label of a segment: ids from ``count`` on, ``end`` that of its last token."""
    counted = np.where(chunk_id == NO_CHUNK, np.int32(NO_CHUNK), chunk_id + np.int32(count))
    if is_end and side.eod is not None:
        last = count + end if has_pair else NO_CHUNK
        counted = np.append(counted, np.int32(last))
    return counted[1:] if side.lead is None else counted

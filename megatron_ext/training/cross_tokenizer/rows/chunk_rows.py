"""Chunks of all segments of a batch, in label coordinates. B rows, T label positions, L labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText, Ids
from megatron_ext.training.cross_tokenizer.rows.layout import Layout
from megatron_ext.training.cross_tokenizer.rows.side import Side


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
    student_rows, teacher_rows, is_end = [], [], []
    for piece in pieces:
        teacher = piece.teachers[teacher_index]
        student_ids, teacher_ids = teacher.student_chunk_id, teacher.teacher_chunk_id
        if _loses_first(student_ids, student_side) or _loses_first(teacher_ids, teacher_side):
            student_ids, teacher_ids = _without_first(student_ids), _without_first(teacher_ids)
        student_rows.append(student_ids)
        teacher_rows.append(teacher_ids)
        is_end.append(piece.is_end)
    counts = _chunk_counts(student_rows)
    has_pair = np.array(is_end, np.bool_) & pairs_ends
    first = np.cumsum(counts + has_pair) - counts - has_pair
    pair_ids = np.where(has_pair, first + counts, NO_CHUNK)
    student, others = (
        _labels(rows, side, is_end, first, pair_ids)
        for rows, side in ((student_rows, student_side), (teacher_rows, teacher_side))
    )
    return AlignmentBatch.from_chunk_ids(
        torch.from_numpy(layouts[0].scattered(student, NO_CHUNK)),
        torch.from_numpy(layouts[1].scattered(others, NO_CHUNK)),
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


def _chunk_counts(rows: Sequence[Ids]) -> NDArray[np.int64]:
    """Chunks of each piece [S], from chunk ids that ascend from 0."""
    counts = np.zeros(len(rows), np.int64)
    filled = [index for index, row in enumerate(rows) if len(row)]
    if filled:
        lengths = [len(rows[index]) for index in filled]
        starts = np.cumsum([0, *lengths[:-1]])
        flat = np.concatenate([rows[index] for index in filled])
        counts[filled] = np.maximum.reduceat(flat, starts) + 1
    return counts


def _labels(
    rows: Sequence[Ids],
    side: Side,
    is_end: Sequence[bool],
    first: NDArray[np.int64],
    pair_ids: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Chunk of each label [L], of pieces [S] whose chunks count from ``first`` on.

    Args:
        rows: Chunk ids of each piece, counted from 0 in it.
        side: Whose.
        is_end: Whether a text ends with each.
        first: [S]
        pair_ids: [S] chunk of the token that ends the text.
    """
    # The end is written behind the chunk ids: a place for it is left here.
    place = np.full(1, NO_CHUNK, np.int32)
    has_eod = np.array(is_end, np.bool_) & (side.eod is not None)
    parts = [
        part
        for row, has in zip(rows, has_eod.tolist(), strict=True)
        for part in ((row, place) if has else (row,))
    ]
    flat = np.concatenate([place[:0], *parts])
    lengths = np.fromiter(map(len, rows), np.int64, len(rows)) + has_eod
    labels = np.where(flat == NO_CHUNK, NO_CHUNK, flat + np.repeat(first, lengths))
    stops = np.cumsum(lengths)
    labels[stops[has_eod] - 1] = pair_ids[has_eod]
    if side.lead is None:
        # The first token of a piece is read and not predicted.
        labels = np.delete(labels, (stops - lengths)[lengths > 0])
    return labels

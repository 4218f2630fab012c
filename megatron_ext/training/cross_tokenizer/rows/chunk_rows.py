"""Chunks of all segments of a batch, in label coordinates. T tokens of a segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.alignment.chunk_places import BEGINS, OUTSIDE, Marks
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText
from megatron_ext.training.cross_tokenizer.rows.layout import Layout
from megatron_ext.training.cross_tokenizer.rows.segment import Parts

_PAIRED_END: Final = np.array([BEGINS], np.uint8)
_LONE_END: Final = np.array([OUTSIDE], np.uint8)


def alignment_batch(
    pieces: Iterable[AlignedText], teacher_index: int, student: Layout, teacher: Layout
) -> AlignmentBatch:
    """The alignment of the student's rows with a teacher's.

    Where both sides end a text with their end-of-document token, the two are a chunk. A chunk of
    which a side does not predict a token, because no token leads, is dropped on both.

    Args:
        pieces: All segments, row after row.
        teacher_index: Among the teachers that have another tokenizer than the student.
        student: The student's layout.
        teacher: The teacher's.
    """
    parts = list(_parts(pieces, teacher_index, student, teacher))
    return AlignmentBatch.from_marks(
        student.laid_out((own for own, _ in parts), OUTSIDE, np.uint8),
        teacher.laid_out((its for _, its in parts), OUTSIDE, np.uint8),
    )


def identity_batch(labels: torch.Tensor) -> AlignmentBatch:
    """The alignment with a teacher of the same tokenizer: each label [B, T] is a chunk."""
    is_label = (labels != IGNORE_INDEX).flatten()
    counted = is_label.cumsum(0)
    chunk_id = torch.where(is_label, counted - 1, NO_CHUNK).view(labels.shape)
    return AlignmentBatch.from_chunk_ids(chunk_id, chunk_id)


def _parts(
    pieces: Iterable[AlignedText], teacher_index: int, student: Layout, teacher: Layout
) -> Iterator[tuple[Parts, Parts]]:
    """The marks of each segment's labels, on both sides."""
    for piece, own, its in zip(pieces, student.segments, teacher.segments, strict=True):
        tokens = piece.teachers[teacher_index]
        own_marks, its_marks = tokens.student_marks, tokens.teacher_marks
        if own.reads_first(own_marks) or its.reads_first(its_marks):
            own_marks, its_marks = _without_first(own_marks), _without_first(its_marks)
        end = _LONE_END if own.eod is None or its.eod is None else _PAIRED_END
        yield own.at_labels(own_marks, end), its.at_labels(its_marks, end)


def _without_first(marks: Marks) -> Marks:
    """The marks [T] without the first chunk."""
    second = np.flatnonzero(marks >= BEGINS)[1:2].tolist()
    kept: Marks = marks.copy()
    kept[: second[0] if second else len(marks)] = OUTSIDE
    return kept

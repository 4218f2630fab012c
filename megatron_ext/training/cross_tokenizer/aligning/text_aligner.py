"""Batches of text to what every model reads of them. D texts, N student tokens, M teacher tokens.

All texts are tokenized in one call a tokenizer and aligned in one call a teacher, as one long text:
the end of a text is a boundary that both sides have, so no chunk crosses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.byte_alignment import align_byte_ends
from megatron_ext.constants import NO_CHUNK
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import (
    AlignedText,
    Ids,
    TeacherTokens,
)
from megatron_ext.training.cross_tokenizer.aligning.text_tokens import TextTokenizer, TextTokens

ChunkIds = tuple[Ids, Ids]


class TextAligner:
    """Tokenizes and aligns.

    Args:
        student_tokenizer: The student's.
        teacher_tokenizers: Those of teachers that have another one.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        teacher_tokenizers: Sequence[MegatronTokenizerText] = (),
    ) -> None:
        self._student = TextTokenizer(student_tokenizer)
        self._teachers = [TextTokenizer(tokenizer) for tokenizer in teacher_tokenizers]

    def align(self, texts: Sequence[str]) -> list[AlignedText]:
        """Each of D texts, for all models.

        Raises:
            TokenizerError: A text that a tokenizer cannot take.
        """
        if not texts:
            return []
        raws = [utf8(text) for text in texts]
        student = self._student.encode(texts, raws)
        teachers = [teacher.encode(texts, raws) for teacher in self._teachers]
        chunk_ids = [_chunk_ids(student, teacher) for teacher in teachers]
        widths = student.widths
        bounds = [_slices(tokens) for tokens in (student, *teachers)]
        return [
            AlignedText(
                student.ids[own],
                widths[own],
                tuple(
                    TeacherTokens(teacher.ids[its], ids[own], teacher_ids[its])
                    for teacher, (ids, teacher_ids), its in zip(
                        teachers, chunk_ids, others, strict=True
                    )
                ),
            )
            for own, *others in zip(*bounds, strict=True)
        ]


def _slices(tokens: TextTokens) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise(tokens.offsets.tolist())]


def _chunk_ids(student: TextTokens, teacher: TextTokens) -> ChunkIds:
    """Chunk of each token of all texts [N], [M], counted from 0 in each text."""
    if not _end_alike(student, teacher):
        return _chunk_ids_of_each(student, teacher)
    alignment = align_byte_ends(student.ends, teacher.ends)
    first = alignment.student_spans[:, 0].searchsorted(student.offsets[:-1])
    return (
        _counted_in_each(alignment.student_chunk_id, first, student.offsets),
        _counted_in_each(alignment.teacher_chunk_id, first, teacher.offsets),
    )


def _end_alike(student: TextTokens, teacher: TextTokens) -> bool:
    """Whether both sides give tokens for the same texts.

    A tokenizer may give none for white space; then nothing of it ends where that text does.
    """
    return np.array_equal(np.diff(student.offsets) > 0, np.diff(teacher.offsets) > 0)


def _chunk_ids_of_each(student: TextTokens, teacher: TextTokens) -> ChunkIds:
    """The same text by text."""
    parts: list[ChunkIds] = []
    bounds = zip(_slices(student), _slices(teacher), student.byte_offsets.tolist(), strict=False)
    for own, its, begin in bounds:
        alignment = align_byte_ends(student.ends[own] - begin, teacher.ends[its] - begin)
        parts.append((alignment.student_chunk_id, alignment.teacher_chunk_id))
    return np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])


def _counted_in_each(chunk_id: Ids, first: NDArray[np.intp], offsets: NDArray[np.int64]) -> Ids:
    """Chunk ids that count from 0 in each text, of whose chunks ``first`` [D] is the first."""
    counted = chunk_id - np.repeat(first.astype(np.int32), np.diff(offsets))
    return np.where(chunk_id == NO_CHUNK, np.int32(NO_CHUNK), counted)

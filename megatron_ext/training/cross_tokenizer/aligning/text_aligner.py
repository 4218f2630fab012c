"""Batches of text to what every model reads of them. D texts, N student tokens, M teacher tokens.

All texts are tokenized in one call a tokenizer and aligned in one call a teacher, as one long text:
the end of a text is a boundary that both sides have, so no chunk crosses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_ext.alignment.byte_alignment import align_byte_ends
from megatron_ext.alignment.chunk_marks import Marks, chunk_marks
from megatron_ext.alignment.spelling import SpelledSide, Spelling, as_spelled
from megatron_ext.alignment.tokens import Tokens
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText, TeacherTokens
from megatron_ext.training.cross_tokenizer.aligning.text_tokens import TextTokenizer, TextTokens


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
        marks = [
            self._marks(student, teacher, tokens.spelling)
            for teacher, tokens in zip(teachers, self._teachers, strict=True)
        ]
        widths = student.widths
        bounds = [_slices(tokens) for tokens in (student, *teachers)]
        return [
            AlignedText(
                student.ids[own],
                widths[own],
                tuple(
                    TeacherTokens(teacher.ids[its], student_marks[own], teacher_marks[its])
                    for teacher, (student_marks, teacher_marks), its in zip(
                        teachers, marks, others, strict=True
                    )
                ),
            )
            for own, *others in zip(*bounds, strict=True)
        ]

    def _marks(
        self, student: TextTokens, teacher: TextTokens, spelling: Spelling
    ) -> tuple[Marks, Marks]:
        """The chunks of all texts, on both sides [N], [M]."""
        marks = _spelled_marks(student, teacher)
        texts = list(zip(_slices(student), _slices(teacher), strict=True))
        for index in sorted({*student.changed, *teacher.changed}):
            own, its = texts[index]
            begin = int(student.byte_offsets[index])
            sides = (
                SpelledSide(
                    Tokens(student.ids[own], student.ends[own] - begin), self._student.spelling
                ),
                SpelledSide(Tokens(teacher.ids[its], teacher.ends[its] - begin), spelling),
            )
            found = align_byte_ends(*(side.tokens.ends for side in sides))
            marks[0][own], marks[1][its] = chunk_marks(as_spelled(found, *sides))
        return marks


def _slices(tokens: TextTokens) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise(tokens.offsets.tolist())]


def _spelled_marks(student: TextTokens, teacher: TextTokens) -> tuple[Marks, Marks]:
    """The chunks of all texts by their byte ends, on both sides [N], [M]."""
    if _end_alike(student, teacher):
        return chunk_marks(align_byte_ends(student.ends, teacher.ends))
    parts = [
        chunk_marks(align_byte_ends(student.ends[own] - begin, teacher.ends[its] - begin))
        for own, its, begin in zip(
            _slices(student), _slices(teacher), student.byte_offsets.tolist(), strict=False
        )
    ]
    return np.concatenate([own for own, _ in parts]), np.concatenate([its for _, its in parts])


def _end_alike(student: TextTokens, teacher: TextTokens) -> bool:
    """Whether both sides give tokens for the same texts.

    A tokenizer may give none for white space; then nothing of it ends where that text does.
    """
    return np.array_equal(np.diff(student.offsets) > 0, np.diff(teacher.offsets) > 0)

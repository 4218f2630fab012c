"""Batches of text to what every model reads of them. D texts.

All texts are tokenized in one call a tokenizer and aligned in one call a teacher.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.alignment.text_tokens import TextTokenizer
from megatron_ext.alignment.token_aligner import TokenAligner
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText, TeacherTokens


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
        self._aligners = [TokenAligner(student_tokenizer, other) for other in teacher_tokenizers]

    def align(self, texts: Sequence[str]) -> list[AlignedText]:
        """Each of D texts, for all models.

        Raises:
            TokenizerError: A text that a tokenizer cannot take.
        """
        if not texts:
            return []
        raws = [utf8(text) for text in texts]
        student = self._student.encode(texts, raws)
        teachers = [aligner.teacher.encode(texts, raws) for aligner in self._aligners]
        marks = [
            aligner.align_joined(student, teacher)
            for aligner, teacher in zip(self._aligners, teachers, strict=True)
        ]
        widths = student.widths
        bounds = [tokens.slices for tokens in (student, *teachers)]
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

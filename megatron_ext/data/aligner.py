"""Texts and conversations to what every model reads of them. D texts, T tokens, C chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_ext.alignment.chunk_places import chunk_marks, without_chunks
from megatron_ext.alignment.conversation_alignment import align_encoded_conversations
from megatron_ext.alignment.text_tokens import TextTokenizer
from megatron_ext.alignment.token_aligner import TokenAligner
from megatron_ext.constants import NO_CHUNK
from megatron_ext.conversation import EncodedConversation
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.data.aligned_text import AlignedText, TeacherTokens
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8

Content = str | ConversationRecord


class Aligner(Protocol):
    """What makes aligned texts."""

    def align(self, contents: Sequence[Content]) -> list[AlignedText]:
        """Each of the contents, for all models.

        Raises:
            TokenizerError: A text that a tokenizer cannot take.
            ConfigError: A conversation, and a tokenizer without a prompt format.
            ConversationError: A conversation that is malformed, or does not fit a format.
        """
        ...


class ContentAligner:
    """Tokenizes and aligns: texts together, conversations one at a time.

    Args:
        student_tokenizer: The student's.
        teacher_tokenizers: Those of teachers that have another one.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        teacher_tokenizers: Sequence[MegatronTokenizerText] = (),
    ) -> None:
        self._texts = TextAligner(student_tokenizer, teacher_tokenizers)
        self._conversations = ConversationAligner(student_tokenizer, teacher_tokenizers)

    def align(self, contents: Sequence[Content]) -> list[AlignedText]:
        """``Aligner.align``."""
        texts = iter(self._texts.align([text for text in contents if isinstance(text, str)]))
        return [
            next(texts) if isinstance(content, str) else self._conversations.align(content)
            for content in contents
        ]


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
        slices = [tokens.slices for tokens in (student, *teachers)]
        return [
            AlignedText(
                student.ids[student_slice],
                widths[student_slice],
                tuple(
                    TeacherTokens(
                        teacher.ids[teacher_slice],
                        student_marks[student_slice],
                        teacher_marks[teacher_slice],
                    )
                    for teacher, (student_marks, teacher_marks), teacher_slice in zip(
                        teachers, marks, teacher_slices, strict=True
                    )
                ),
            )
            for student_slice, *teacher_slices in zip(*slices, strict=True)
        ]


class ConversationAligner:
    """Writes a conversation with each model's own template and aligns what messages say.

    Args:
        student_tokenizer: The student's, with a prompt format.
        teacher_tokenizers: Those of teachers that have another one, or another format.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        teacher_tokenizers: Sequence[MegatronTokenizerText] = (),
    ) -> None:
        self._student = student_tokenizer
        self._teachers = tuple(teacher_tokenizers)

    def align(self, record: ConversationRecord) -> AlignedText:
        """A conversation, of which only what the student is trained on is in chunks.

        Raises:
            ConfigError: A tokenizer has no prompt format.
            ConversationError: The conversation is malformed, or does not fit a format.
        """
        student = _encoded(self._student, record)
        return AlignedText(
            student.ids.astype(np.int32),
            np.diff(student.byte_ends, prepend=0).astype(np.int32),
            tuple(self._teacher_tokens(student, teacher, record) for teacher in self._teachers),
            trained=student.trained,
        )

    def _teacher_tokens(
        self,
        student: EncodedConversation,
        tokenizer: MegatronTokenizerText,
        record: ConversationRecord,
    ) -> TeacherTokens:
        teacher = _encoded(tokenizer, record)
        alignment = align_encoded_conversations(
            student,
            teacher,
            student_tokenizer=self._student,
            teacher_tokenizer=tokenizer,
        ).alignment
        chunk_id = alignment.student_chunk_id
        untrained = np.zeros(alignment.chunk_count, np.bool_)
        untrained[chunk_id[(chunk_id != NO_CHUNK) & ~student.trained]] = True
        student_marks, teacher_marks = (
            without_chunks(marks, untrained) for marks in chunk_marks(alignment)
        )
        ids = teacher.ids.astype(np.int32)
        return TeacherTokens(ids, student_marks, teacher_marks, teacher.trained)


def _encoded(tokenizer: MegatronTokenizerText, record: ConversationRecord) -> EncodedConversation:
    return tokenizer.encode_conversation(
        record.messages, template_variables=record.template_variables
    )

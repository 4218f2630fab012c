"""Texts and conversations to what every model reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText
from megatron_ext.training.cross_tokenizer.aligning.conversation_aligner import ConversationAligner
from megatron_ext.training.cross_tokenizer.aligning.text_aligner import TextAligner

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

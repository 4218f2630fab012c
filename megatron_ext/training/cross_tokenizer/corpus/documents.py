"""What packing asks of a corpus. D documents."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.tokenizers.token_ids import IdArray
from megatron_ext.training.cross_tokenizer.corpus.report import CorpusReport


class Documents(Protocol):
    """Documents by number. They can be sent to another process."""

    def __len__(self) -> int: ...

    def content(self, index: int) -> str | ConversationRecord:
        """One document.

        Raises:
            IndexError: There is no such document.
            DataError: Its file has changed since.
            ConversationError: It is a conversation that cannot be read.
            TokenizerError: It is kept as ids that spell no text.
        """

    def place(self, index: int) -> str:
        """``file:row`` of a document."""

    def student_ids(self, index: int) -> IdArray | None:
        """What the student is to read, where the document is kept as ids of its tokenizer."""

    @property
    def has_student_ids(self) -> bool:
        """Whether any document is kept so."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[D] UTF-8 bytes of each document."""

    @property
    def report(self) -> CorpusReport:
        """What became of the rows."""

    @property
    def sha256(self) -> str:
        """Hash of the documents in their order, wherever their files are."""

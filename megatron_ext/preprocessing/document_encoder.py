"""Encoders of records: texts in large batches, conversations one by one with loss masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.message import content_text
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.conversation.rendering.template_limits import stopped_at
from megatron_ext.data.sft_samples import SFTSample
from megatron_ext.documents.record_fields import BadRecord, RecordBlock
from megatron_ext.errors import ConfigError, ConversationError, TokenizerError
from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.encoded_documents import EncodedDocuments
from megatron_ext.tokenizers import MegatronTokenizerText

_FIRST_BATCH_WORDS = 1 << 13


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Documents and bad records of one block."""

    documents: tuple[EncodedDocuments, ...]
    """Documents of all good records, for each key."""

    bad: tuple[BadRecord, ...]
    """Records that the tokenizer or the template refuses."""

    text_bytes: int
    """UTF-8 bytes of the text that was tokenized."""


class DocumentEncoder(Protocol):
    """Tokenizer of blocks of records."""

    def encode(self, block: RecordBlock) -> EncodedBlock:
        """Tokenize the records of ``block``."""
        ...


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Encoder of texts, or of lists of sentences, each of which becomes a sequence.

    Attributes:
        tokenizer: The tokenizer.
        eod: The token that ends each document; None for none.
    """

    tokenizer: MegatronTokenizerText
    eod: int | None = None

    def encode(self, block: RecordBlock) -> EncodedBlock:
        try:
            return self._encode(block.columns)
        except TokenizerError:
            # A text is refused; the null tokenizer, for one, reads numbers only.
            good, bad = self._split_refused(block)
            return replace(self._encode(good.columns), bad=bad)

    def _split_refused(self, block: RecordBlock) -> tuple[RecordBlock, tuple[BadRecord, ...]]:
        """The records that the tokenizer accepts, and those that it refuses."""
        good = RecordBlock(tuple([] for _ in block.columns))
        bad: list[BadRecord] = []
        for line, *values in zip(block.lines, *block.columns, strict=True):
            try:
                self._encode([[value] for value in values])
            except TokenizerError as error:
                bad.append(BadRecord.of(line, error))
            else:
                good.add(line, values)
        return good, tuple(bad)

    def _encode(self, columns: Sequence[list[Any]]) -> EncodedBlock:
        encoded = [self._column(column) for column in columns]
        documents = tuple(documents for documents, _ in encoded)
        return EncodedBlock(documents, (), sum(size for _, size in encoded))

    def _column(self, column: list[Any]) -> tuple[EncodedDocuments, int]:
        sentences: list[str] = []
        counts = np.ones(len(column), np.int64)
        for row, value in enumerate(column):
            if isinstance(value, str):
                sentences.append(value)
            else:
                sentences.extend(value)
                counts[row] = len(value)
        ids, offsets = self.tokenizer.text_to_flat_ids(sentences)
        documents = EncodedDocuments.from_sequences(ids, np.diff(offsets), counts)
        if self.eod is not None:
            documents = documents.with_eod(self.eod)
        return documents, sum(map(_utf8_length, sentences))


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Encoder of conversations, one sequence each, with a loss mask.

    The first token is never trained, whatever the format says: among packed documents it would be
    predicted from another conversation. The end-of-document token is trained if the token before it
    is, and is not repeated if the conversation ends with it.

    Attributes:
        tokenizer: The tokenizer.
        eod: The token that ends each document; None for none.
        moment: Time that templates take as the current one; None for the time of the call.
    """

    tokenizer: MegatronTokenizerText
    eod: int | None = None
    moment: datetime | None = None

    def encode(self, block: RecordBlock) -> EncodedBlock:
        with stopped_at(self.moment):
            return self._encode(block)

    def _encode(self, block: RecordBlock) -> EncodedBlock:
        good: list[list[tuple[NDArray[np.int32], NDArray[np.uint8]]]] = []
        bad: list[BadRecord] = []
        text_bytes = 0
        for line, *records in zip(block.lines, *block.columns, strict=True):
            try:
                # A record with one bad key is left out under all keys: outputs stay parallel.
                good.append([self._conversation(record) for record in records])
            except (ConversationError, TokenizerError) as error:
                bad.append(BadRecord.of(line, error))
                continue
            messages = (message for record in records for message in record.messages)
            text_bytes += sum(_utf8_length(content_text(message)) for message in messages)
        documents = tuple(
            _documents(row[index] for row in good) for index in range(len(block.columns))
        )
        return EncodedBlock(documents, tuple(bad), text_bytes)

    def _conversation(
        self, record: ConversationRecord
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        sample = SFTSample.of(
            self.tokenizer, record.messages, record.template_variables, eod=self.eod
        )
        trained = (sample.target != IGNORE_INDEX).astype(np.uint8)
        trained[:1] = 0
        return sample.ids.astype(np.int32), trained


def document_encoder(
    config: PreprocessConfig, tokenizer: MegatronTokenizerText, moment: str | None = None
) -> DocumentEncoder:
    """Build the encoder of a run.

    Args:
        config: Settings of the run.
        tokenizer: The tokenizer.
        moment: Time that templates take as the current one, in ISO 8601.

    Raises:
        ConfigError: An end-of-document token is requested and the tokenizer has none.
        TokenizerError: The requested engine cannot be used.
    """
    if config.append_eod and tokenizer.eod is None:
        raise ConfigError(
            "the tokenizer has no end-of-document token",
            where="--append-eod",
            fix="leave it out, or use a tokenizer that has an EOS",
        )
    if config.tokenizer.engine == "gigatoken":
        # An engine fails on its first batch if it cannot be used: try it before the run.
        tokenizer.text_to_flat_ids(["word " * _FIRST_BATCH_WORDS])
    eod = tokenizer.eod if config.append_eod else None
    if not config.has_conversations:
        return TextEncoder(tokenizer, eod)
    now = None if moment is None else datetime.fromisoformat(moment)
    return ConversationEncoder(tokenizer, eod, now)


def _documents(
    rows: Iterable[tuple[NDArray[np.int32], NDArray[np.uint8]]],
) -> EncodedDocuments:
    pairs = [(np.zeros(0, np.int32), np.zeros(0, np.uint8)), *rows]
    lengths = np.array([len(ids) for ids, _ in pairs[1:]], np.int64)
    return EncodedDocuments(
        np.concatenate([ids for ids, _ in pairs]),
        lengths[lengths > 0],
        (lengths > 0).astype(np.int64),
        np.concatenate([trained for _, trained in pairs]),
    )


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())

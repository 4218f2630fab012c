"""``SFTSample``, a conversation as ids and labels, and the arrays of a sample of several.

S tokens of a sample, T tokens of a conversation, K conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation import Conversation
from megatron_ext.data.sft_records import ConversationInput, LossMode, SFTConfig, SFTRecords
from megatron_ext.errors import ConfigError, ConversationError, UntrainedError
from megatron_ext.tokenizers import MegatronTokenizerText

Side = Literal["left", "right"]
_Length = TypeVar("_Length", int, NDArray[np.int64])


@dataclass(frozen=True, eq=False, slots=True)
class SFTSample:
    """Ids and targets of one conversation."""

    ids: NDArray[np.int64]
    """[T]"""
    target: NDArray[np.int64]
    """[T] the id of a trained token, else ``IGNORE_INDEX``."""

    @classmethod
    def of(
        cls,
        tokenizer: MegatronTokenizerText,
        conversation: Conversation,
        template_variables: Mapping[str, Any],
        *,
        eod: int | None = None,
        loss_mode: LossMode = "assistant",
    ) -> SFTSample:
        """Render, tokenize and mask a conversation.

        Args:
            tokenizer: Tokenizer with a prompt format.
            conversation: Messages of the conversation.
            template_variables: Other variables of the template, such as ``tools``.
            eod: A token to append unless the conversation ends with it, trained if the token before
                it is; None for none.
            loss_mode: ``full`` to train every token, whatever the prompt format trains.

        Raises:
            UntrainedError: Nothing of the conversation is trained.
            ConversationError: The conversation is malformed or does not fit the format.
            TokenizerError: The tokenizer cannot take the text.
        """
        is_full = loss_mode == "full"
        tokenized = tokenizer.tokenize_conversation(
            conversation,
            return_target=not is_full,
            add_generation_prompt=False,
            template_variables=template_variables,
        )
        ids, target = (tokenized, tokenized) if is_full else tokenized
        sample = cls(np.asarray(ids, np.int64), np.asarray(target, np.int64))
        return sample if eod is None else sample._with_eod(eod)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> NDArray[np.int64]:
        """[T] labels: the target of the next token, ``IGNORE_INDEX`` at the last."""
        return np.append(self.target[1:], IGNORE_INDEX)[: len(self)]

    @property
    def trained_count(self) -> int:
        """Positions that predict a trained token."""
        return int(np.count_nonzero(self.target[1:] != IGNORE_INDEX))

    def truncated(self, length: int, side: Side, *, bos: int | None) -> SFTSample:
        """The conversation cut to ``length`` tokens on one side; itself if it fits.

        A cut on the right keeps the beginning. A cut on the left keeps the end, behind the
        beginning-of-sequence token if the conversation began with it; the system message is lost,
        since no template writes one before half a message. The first token behind the cut is not
        trained, because its context is gone.

        Args:
            length: At least 1.
            side: Side that loses tokens.
            bos: The tokenizer's beginning-of-sequence token.
        """
        if len(self) <= length:
            return self
        if side == "right":
            return SFTSample(self.ids[:length], self.target[:length])
        has_bos = bos is not None and self.ids[0] == bos
        kept = np.arange(len(self) - length + has_bos, len(self))
        target = self.target.copy()
        target[kept[:1]] = IGNORE_INDEX
        if has_bos:
            kept = np.insert(kept, 0, 0)
        return SFTSample(self.ids[kept], target[kept])

    def _with_eod(self, eod: int) -> SFTSample:
        if not len(self) or self.ids[-1] == eod:
            return self
        target = IGNORE_INDEX if self.target[-1] == IGNORE_INDEX else eod
        return SFTSample(np.append(self.ids, eod), np.append(self.target, target))


def padded_length(length: _Length, multiple: int) -> _Length:
    """``length``, or each length of an array, rounded up to a multiple of ``multiple``."""
    return -(-length // multiple) * multiple


def laid_out(
    samples: Sequence[SFTSample], sequence_length: int, *, multiple: int, pad: int
) -> dict[str, NDArray[np.generic]]:
    """The arrays of one sample.

    Every conversation is a segment, padded at its end to a multiple of ``multiple``; the rest of
    the sample is a segment of padding. Nothing is predicted across the end of a conversation.
    Padding is defined by position, whatever its id.

    Args:
        samples: K conversations that fit together.
        sequence_length: S.
        multiple: Multiple that segments are padded to.
        pad: Id of the padding.

    Returns:
        ``tokens`` [S] int64; ``labels`` [S] int64, ``IGNORE_INDEX`` where nothing is trained;
        ``loss_mask`` [S] float32, 1 where a label is trained; ``position_ids`` [S] int64, from 0 in
        each segment; ``cu_seqlens`` [S + 1] int32, the bounds of the segments, then S repeated;
        ``max_seqlen`` [] int32, tokens of the longest segment.
    """
    tokens = np.full(sequence_length, pad, np.int64)
    labels = np.full(sequence_length, IGNORE_INDEX, np.int64)
    bounds = np.full(sequence_length + 1, sequence_length, np.int32)
    start = 0
    for index, sample in enumerate(samples):
        stop = start + len(sample)
        tokens[start:stop] = sample.ids
        labels[start:stop] = sample.labels
        bounds[index] = start
        start += padded_length(len(sample), multiple)
    bounds[len(samples)] = start
    assert start <= sequence_length, f"{start} tokens in a sample of {sequence_length}"
    sizes = np.diff(bounds)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (labels != IGNORE_INDEX).astype(np.float32),
        "position_ids": np.arange(sequence_length) - np.repeat(bounds[:-1], sizes),
        "cu_seqlens": bounds,
        "max_seqlen": sizes.max(),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTReader:
    """Reader of the tokenized conversations of a record.

    Raises:
        ConfigError: The tokenizer has no end-of-document token and one is to be appended, or the
            sequence length cannot be used.
    """

    records: SFTRecords
    tokenizer: MegatronTokenizerText
    config: SFTConfig
    sequence_length: int
    """Tokens of a sample."""
    multiple: int
    """Multiple that the length of each conversation is padded to."""

    def __post_init__(self) -> None:
        if self.config.append_eod and self.tokenizer.eod is None:
            raise ConfigError(
                "the tokenizer has no end-of-document token to end conversations with",
                fix="unset append_eod, or use a tokenizer that has an EOS",
                where="sft.append_eod",
            )
        if self.sequence_length < 2:
            raise ConfigError(
                "a sample is too short to predict anything",
                got=self.sequence_length,
                expected=">= 2",
                where="sequence_length",
            )
        if self.sequence_length % self.multiple:
            raise ConfigError(
                "padded conversations cannot fill a sample",
                got=self.sequence_length,
                expected=f"a multiple of {self.multiple}, for context parallelism",
                where="sequence_length",
            )

    def samples(self, record: int) -> list[SFTSample | None]:
        """All conversations of a record, uncut; None for one without a trained token.

        Raises:
            DataError: The line is not JSON, or the file has changed.
            ConversationError: The record has no conversation, or one that does not fit the format.
        """
        pieces = self.records.conversations(record)
        samples: list[SFTSample | None] = []
        for number, piece in enumerate(pieces, start=1):
            try:
                samples.append(self._sample(piece))
            except UntrainedError:
                samples.append(None)
            except ConversationError as error:
                if len(pieces) == 1:
                    raise
                raise ConversationError(
                    str(error),
                    fix="if a system message stands within a conversation, unset split_at_system",
                    where=f"conversation {number} of the record",
                ) from error
        return samples

    def sample(self, record: int, piece: int) -> SFTSample:
        """One conversation of a record, cut to fit."""
        return self.cut(self._sample(self.records.conversations(record)[piece]))

    def cut(self, sample: SFTSample) -> SFTSample:
        """A conversation cut to fit a sample."""
        side: Side = "left" if self.config.too_long == "truncate-left" else "right"
        return sample.truncated(self.sequence_length, side, bos=self.tokenizer.bos)

    def _sample(self, piece: ConversationInput) -> SFTSample:
        conversation, variables = piece
        eod = self.tokenizer.eod if self.config.append_eod else None
        return SFTSample.of(
            self.tokenizer, conversation, variables, eod=eod, loss_mode=self.config.loss_mode
        )

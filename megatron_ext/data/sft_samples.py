"""Conversations as tokens and labels, and laid out in one sample.

S tokens of the sample, T tokens of a conversation, K conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation import Conversation
from megatron_ext.data.sft_records import ConversationInput, SFTConfig, SFTRecords
from megatron_ext.errors import ConfigError, ConversationError, UntrainedError
from megatron_ext.tokenizers import MegatronTokenizerText

Side = Literal["left", "right"]
_Length = TypeVar("_Length", int, NDArray[np.int64])


@dataclass(frozen=True, eq=False, slots=True)
class SFTSample:
    """One conversation."""

    ids: NDArray[np.int64]
    """[T]"""
    target: NDArray[np.int64]
    """[T] the id where a token is trained, else ``IGNORE_INDEX``."""

    @classmethod
    def of(
        cls,
        tokenizer: MegatronTokenizerText,
        conversation: Conversation,
        template_variables: Mapping[str, Any],
        *,
        eod: int | None = None,
    ) -> SFTSample:
        """A conversation as ``tokenizer`` renders and masks it.

        Args:
            tokenizer: One that has a prompt format.
            conversation: Its messages.
            template_variables: What its template reads besides, such as ``tools``.
            eod: A token to end with, trained where the token before it is; left out where the
                conversation ends with it. None for none.

        Raises:
            UntrainedError: Nothing of it is trained.
            ConversationError: The conversation is malformed or does not fit the format.
            TokenizerError: The library cannot take its text.
        """
        ids, target = tokenizer.tokenize_conversation(
            conversation,
            return_target=True,
            add_generation_prompt=False,
            template_variables=template_variables,
        )
        sample = cls(np.asarray(ids, np.int64), np.asarray(target, np.int64))
        return sample if eod is None else sample._ended_with(eod)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> NDArray[np.int64]:
        """[T] what each position predicts: the target of the next token, nothing for the last."""
        return np.append(self.target[1:], IGNORE_INDEX)[: len(self)]

    @property
    def trained_count(self) -> int:
        """Positions that predict a trained token."""
        return int(np.count_nonzero(self.target[1:] != IGNORE_INDEX))

    def truncated(self, length: int, side: Side, *, bos: int | None) -> SFTSample:
        """The conversation cut to ``length`` tokens at one of its sides; itself where it fits.

        Cut on the right, it keeps its beginning. Cut on the left, it keeps its end, behind the
        beginning-of-sequence token if it began with that. A system message goes first: before half
        a message of another turn it would stand in a text that no template writes. The first token
        behind the cut is not trained, because what it follows is gone.

        Args:
            length: At least 1.
            side: Which tokens go.
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

    def _ended_with(self, eod: int) -> SFTSample:
        if not len(self) or self.ids[-1] == eod:
            return self
        target = IGNORE_INDEX if self.target[-1] == IGNORE_INDEX else eod
        return SFTSample(np.append(self.ids, eod), np.append(self.target, target))


def padded_length(length: _Length, multiple: int) -> _Length:
    """``length``, or each of them, rounded up to a multiple of ``multiple``."""
    return -(-length // multiple) * multiple


def laid_out(
    samples: Sequence[SFTSample], sequence_length: int, *, multiple: int, pad: int
) -> dict[str, NDArray[np.generic]]:
    """The arrays of one sample.

    Every conversation is a segment, filled up to a multiple of ``multiple`` with padding that
    follows it; what is left of the sample is a segment of padding. Nothing is predicted across the
    end of a conversation, and padding is what stands where no token does, whatever ids there are.

    Args:
        samples: K conversations, which fit.
        sequence_length: S.
        multiple: What the length of each segment divides by.
        pad: Id of the padding.

    Returns:
        ``tokens`` [S] int64; ``labels`` [S] int64, what each position predicts, ``IGNORE_INDEX``
        where nothing is trained; ``loss_mask`` [S] float32, 1 where something is; ``position_ids``
        [S] int64, from 0 in each segment; ``cu_seqlens`` [S + 1] int32, where segments begin and
        the last ends, then S repeated (segments without tokens); ``max_seqlen`` [] int32, tokens
        of the longest segment.
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
    """Tokenizes conversations by number.

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
    """What the length of each conversation is padded to a multiple of."""

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
        """All conversations of a record, whole; None for one in which nothing is trained.

        Raises:
            DataError: The line is no JSON, or the file has changed.
            ConversationError: It gives no conversation, or one that does not fit the format.
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
        """A conversation that fits a sample."""
        side: Side = "left" if self.config.too_long == "truncate-left" else "right"
        return sample.truncated(self.sequence_length, side, bos=self.tokenizer.bos)

    def _sample(self, piece: ConversationInput) -> SFTSample:
        conversation, variables = piece
        eod = self.tokenizer.eod if self.config.append_eod else None
        return SFTSample.of(self.tokenizer, conversation, variables, eod=eod)

"""Several texts through one tokenizer: ids and byte ends over all of them. T tokens, D texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.encoded_texts import encode_texts
from megatron_ext.alignment.spelling import Spelling
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Tokens of texts, one after another."""

    ids: IdArray
    """[T]"""
    ends: ByteEnds
    """[T] where each ends, in bytes from the begin of its own text."""
    offsets: NDArray[np.int64]
    """[D + 1] where the tokens of each text begin; the last entry is T."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """Tokens of each text [D]."""
        return np.diff(self.offsets)

    def of_texts(self, chosen: NDArray[np.bool_]) -> EncodedBatch:
        """The tokens of some of the texts [D]."""
        if chosen.all():
            return self
        tokens = np.repeat(chosen, self.counts)
        offsets = np.cumsum([0, *self.counts[chosen].tolist()], dtype=np.int64)
        return EncodedBatch(self.ids[tokens], self.ends[tokens], offsets)

    def joined_ends(self, raws: Sequence[bytes]) -> ByteEnds:
        """Where each token ends in the texts, whose UTF-8 is ``raws``, put one after another."""
        begins = np.cumsum([0, *map(len, raws)], dtype=np.int64)[:-1]
        return self.ends + np.repeat(begins, self.counts)


class BatchEncoder:
    """Encodes texts as batches, as fast as the tokenizer's library can.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self.spelling = Spelling(tokenizer)

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        """The tokens of ``texts``; special tokens in them are text.

        Raises:
            TokenizerError: The tokenizer refuses one of them.
        """
        encoded = encode_texts(self._tokenizer, self.spelling.table, texts)
        return EncodedBatch(
            np.concatenate([np.zeros(0, np.int32), *(one.ids for one in encoded)]),
            np.concatenate([np.zeros(0, np.int64), *(one.ends for one in encoded)]),
            np.cumsum([0, *(len(one.ids) for one in encoded)], dtype=np.int64),
        )

    def refusal(self, text: str) -> str | None:
        """Why the tokenizer does not take a text; None where it does."""
        try:
            self._tokenizer.text_to_ids(text)
        except TokenizerError as error:
            return str(error)
        return None

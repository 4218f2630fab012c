"""One side of a pair: its tokenizer, and what is counted of its tokens. T tokens, C chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.coverage import tokens_per_chunk
from megatron_ext.alignment.text_tokens import TextTokens
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import ByteTokenizer


@dataclass(frozen=True, slots=True)
class SideReport:
    """What one tokenizer made of the text."""

    vocab_size: int
    tokens: int
    bytes_per_token: float
    unknown_tokens: int
    """Unknown tokens: text that the tokenizer cannot represent."""
    unknown_bytes: int
    """Bytes that they stand for."""
    longest_chunk: int
    """Most tokens of this side in one chunk."""


class Side:
    """One tokenizer, and what is counted of its tokens.

    Args:
        tokenizer: The tokenizer.

    Attributes:
        unaligned: Its tokens in no chunk.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.unaligned = 0
        self._tokenizer = tokenizer
        self._unknown = tokenizer.unk_id
        self._tokens = self._unknown_tokens = self._unknown_bytes = self._longest = 0

    def refusal(self, text: str) -> str | None:
        """Why the tokenizer does not take a text; None where it does."""
        try:
            self._tokenizer.text_to_ids(text)
        except TokenizerError as error:
            return str(error)
        return None

    def count(self, encoded: TextTokens) -> None:
        """Tokens of a batch, and the unknown ones among them."""
        self._tokens += len(encoded.ids)
        self.unaligned += len(encoded.ids)
        if self._unknown is None:
            return
        unknown = np.flatnonzero(encoded.ids == self._unknown)
        self._unknown_tokens += len(unknown)
        self._unknown_bytes += int(encoded.widths[unknown].sum()) if len(unknown) else 0

    def count_chunks(self, chunk_id: NDArray[np.int32], chunk_count: int) -> NDArray[np.int64]:
        """Tokens in each chunk of the batch [C]."""
        sizes = tokens_per_chunk(chunk_id, chunk_count)
        self.unaligned -= int(sizes.sum())
        self._longest = max(self._longest, int(sizes.max(initial=0)))
        return sizes

    def report(self, byte_count: int) -> SideReport:
        """The counts, over a text of so many bytes."""
        return SideReport(
            vocab_size=self._tokenizer.vocab_size,
            tokens=self._tokens,
            bytes_per_token=byte_count / self._tokens if self._tokens else float("nan"),
            unknown_tokens=self._unknown_tokens,
            unknown_bytes=self._unknown_bytes,
            longest_chunk=self._longest,
        )

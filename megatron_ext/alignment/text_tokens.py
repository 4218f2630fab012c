"""Ids and byte ends of batches of texts. D texts, N tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.spelling import Spelling, Tokens
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import utf8
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Ids of D texts, one text after another."""

    ids: IdArray
    """[N] int32"""

    ends: ByteEnds
    """[N] int64 where each token ends in the UTF-8 of all texts one after another."""

    offsets: NDArray[np.int64]
    """[D + 1] where the tokens of each text begin and end."""

    byte_offsets: NDArray[np.int64]
    """[D + 1] where the bytes of each text begin and end."""

    changed: Sequence[int] = ()
    """Indices of the texts that their tokens do not spell, ascending."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """[D] tokens of each text."""
        return np.diff(self.offsets)

    @property
    def slices(self) -> list[slice]:
        """[D] slice of the tokens of each text."""
        return [slice(begin, end) for begin, end in pairwise(self.offsets.tolist())]

    @property
    def widths(self) -> IdArray:
        """[N] bytes that each token covers."""
        widths = np.diff(self.ends, prepend=0)
        has_tokens = np.diff(self.offsets) > 0
        # A preceding text without tokens has no end that would mark the begin of this one.
        firsts = self.offsets[:-1][has_tokens]
        widths[firsts] = self.ends[firsts] - self.byte_offsets[:-1][has_tokens]
        return widths.astype(np.int32)

    @property
    def joined(self) -> Tokens:
        """The tokens of all texts as those of one."""
        return Tokens(self.ids, self.ends, spells_text=not self.changed)

    def tokens_of(self, index: int) -> slice:
        """Slice of the tokens of one text."""
        return slice(*self.offsets[index : index + 2].tolist())

    def text(self, index: int) -> Tokens:
        """The tokens of one text, with ends from its begin."""
        tokens = self.tokens_of(index)
        ends = self.ends[tokens] - self.byte_offsets[index]
        return Tokens(self.ids[tokens], ends, spells_text=index not in self.changed)

    def of_texts(self, chosen: NDArray[np.bool_]) -> TextTokens:
        """The tokens of the ``chosen`` texts [D] only, with offsets counted without the others."""
        if chosen.all():
            return self
        counts, sizes = self.counts, np.diff(self.byte_offsets)
        is_kept = np.repeat(chosen, counts)
        removed_bytes = np.repeat(np.cumsum(np.where(chosen, 0, sizes)), counts)
        numbers = np.cumsum(chosen) - 1
        return TextTokens(
            self.ids[is_kept],
            self.ends[is_kept] - removed_bytes[is_kept],
            np.cumsum(np.append(0, counts[chosen])),
            np.cumsum(np.append(0, sizes[chosen])),
            [int(numbers[index]) for index in self.changed if chosen[index]],
        )


class TextTokenizer:
    """Encodes batches of text with byte ends, by the tokenizer's engine where that is fast.

    The engine gives ids only. Where their bytes spell the text, the ends follow from their lengths;
    for a text that the tokenizer normalises (lower case, NFC) the tokenizer gives the ends.

    Args:
        tokenizer: The tokenizer. It must be picklable for this object to be.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.spelling = Spelling(tokenizer)

    def encode(self, texts: Sequence[str], raws: Sequence[bytes] | None = None) -> TextTokens:
        """Ids and byte ends of D texts; special tokens in them are text.

        Args:
            texts: D texts.
            raws: Their UTF-8, where it has been computed already.

        Raises:
            TokenizerError: A text that the tokenizer cannot take.
        """
        raws = [utf8(text) for text in texts] if raws is None else raws
        ids, offsets = self.tokenizer.text_to_flat_ids(texts)
        ends, changed = self.spelling.table.ends_within_joined(ids, offsets, raws)
        begins = np.fromiter(accumulate(map(len, raws), initial=0), np.int64, len(raws) + 1)
        tokens = TextTokens(ids, ends, offsets, begins)
        return self._located(texts, tokens, changed) if changed else tokens

    def _located(
        self, texts: Sequence[str], tokens: TextTokens, changed: Sequence[int]
    ) -> TextTokens:
        """``tokens`` with ids and ends of the texts ``changed`` from the tokenizer itself."""
        rows = [(tokens.ids[text], tokens.ends[text]) for text in tokens.slices]
        for index in changed:
            ids, ends = self.tokenizer.encode_with_byte_ends(texts[index])
            rows[index] = ids, ends + tokens.byte_offsets[index]
        counts = accumulate((len(ids) for ids, _ in rows), initial=0)
        return TextTokens(
            np.concatenate([ids for ids, _ in rows]),
            np.concatenate([ends for _, ends in rows]),
            np.fromiter(counts, np.int64, len(rows) + 1),
            tokens.byte_offsets,
            changed,
        )

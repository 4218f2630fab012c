"""Many texts to ids, and where each token ends in them. D texts, N tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.spelling import Spelling
from megatron_ext.tokenizers import MegatronTokenizerText
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
    """Texts that the tokens do not spell, ascending."""

    @property
    def widths(self) -> IdArray:
        """[N] bytes that each token covers."""
        widths = np.diff(self.ends, prepend=0)
        has_tokens = np.diff(self.offsets) > 0
        # The text before may have no tokens: then no end says where this one begins.
        firsts = self.offsets[:-1][has_tokens]
        widths[firsts] = self.ends[firsts] - self.byte_offsets[:-1][has_tokens]
        return widths.astype(np.int32)


class TextTokenizer:
    """Encodes batches of text with byte ends, by the tokenizer's engine where that is fast.

    The engine gives ids alone. Where their bytes spell the text, the ends follow; a text that its
    tokenizer changes (lower case, NFC) is located by the tokenizer itself.

    Args:
        tokenizer: The tokenizer. It can be sent to another process with this.
    """

    def __init__(self, tokenizer: MegatronTokenizerText) -> None:
        self.tokenizer = tokenizer
        self.spelling = Spelling(tokenizer)

    def encode(self, texts: Sequence[str], raws: Sequence[bytes]) -> TextTokens:
        """Ids and byte ends of ``texts``, whose UTF-8 is ``raws`` [D].

        Raises:
            TokenizerError: A text that the tokenizer cannot take.
        """
        ids, offsets = self.tokenizer.text_to_flat_ids(texts)
        ends, changed = self.spelling.table.ends_within_joined(ids, offsets, raws)
        begins = np.fromiter(accumulate(map(len, raws), initial=0), np.int64, len(raws) + 1)
        tokens = TextTokens(ids, ends, offsets, begins)
        return self._located(texts, tokens, changed) if changed else tokens

    def _located(
        self, texts: Sequence[str], tokens: TextTokens, changed: Sequence[int]
    ) -> TextTokens:
        """The same with the texts ``changed`` as the tokenizer locates their tokens."""
        bounds = pairwise(tokens.offsets.tolist())
        rows = [(tokens.ids[begin:end], tokens.ends[begin:end]) for begin, end in bounds]
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

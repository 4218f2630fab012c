"""Many texts to ids and byte ends, by a tokenizer's path for batches. D texts, N tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.tokens import Tokens
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes, utf8
from megatron_ext.tokenizers.token_ids import IdArray


def encode_texts(tokenizer: ByteTokenizer, table: TokenBytes, texts: Sequence[str]) -> list[Tokens]:
    """What ``encode_with_byte_ends`` gives of each of D texts, of all of them in one call.

    The batch path gives ids alone. Where their bytes spell the text, the ends follow from them; a
    text that the tokenizer changes (lower case, NFC) is located by the tokenizer itself.

    Args:
        tokenizer: Any.
        table: Bytes of each of its ids.
        texts: D texts.

    Raises:
        TokenizerError: A text that the tokenizer cannot take.
    """
    raws = [utf8(text) for text in texts]
    ids, offsets = _flat_ids(tokenizer, texts)
    ends, changed = table.ends_within_each(ids, offsets, raws)
    tokens = [
        Tokens(ids[begin:end], ends[begin:end], spells_text=True)
        for begin, end in pairwise(offsets.tolist())
    ]
    for index in changed:
        tokens[index] = Tokens(*tokenizer.encode_with_byte_ends(texts[index]))
    return tokens


def encode_text(tokenizer: ByteTokenizer, table: TokenBytes, text: str) -> Tokens:
    """What ``encode_with_byte_ends`` gives of one text.

    Raises:
        TokenizerError: A text that the tokenizer cannot take.
    """
    ids, ends = tokenizer.encode_with_byte_ends(text)
    return Tokens(ids, ends, spells_text=table.ends_within(ids, text.encode()) is not None)


def _flat_ids(tokenizer: ByteTokenizer, texts: Sequence[str]) -> tuple[IdArray, NDArray[np.int64]]:
    rows = tokenizer.text_to_ids_batch(texts)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.concatenate([np.empty(0, dtype=np.int32), *rows]), offsets

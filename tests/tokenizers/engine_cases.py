"""Fast encoders of the tokenizers in ``tokenizer_files``, made as the adapters make theirs."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_ext.tokenizers import MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.engine import FastEncoder, GigatokenEngine, flat_ids
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.tokenizer_files import file_kind

FAST = (
    *("sentencepiece-v1", "sentencepiece-v3", "sentencepiece-v7"),
    *("tekken", "json-rank-list", "rank-file"),
    *("huggingface-byte-level", "huggingface-nfc", "huggingface-metaspace"),
)
"""Tokenizers that gigatoken can encode."""

SLOW = (
    *("sentencepiece-nfkc", "sentencepiece-nfkc-bytes"),
    *("huggingface-wordpiece", "huggingface-unigram"),
)
"""Tokenizers that it cannot."""

FILLER = "Enough text that the engine is used for it.\n" * 250


def adapter_of(path: Path, **options: object) -> TableTokenizer:
    """The adapter of a tokenizer file."""
    built: MegatronTokenizerTextAbstract = TOKENIZER_LIBRARIES[file_kind(path).library].build(
        path, {"engine": "reference", **options}
    )
    assert isinstance(built, TableTokenizer)
    return built


def encoder_of(
    adapter: TableTokenizer,
    choice: str = "auto",
    *,
    build: Callable[[], GigatokenEngine] | None = None,
    reference: Callable[[Sequence[str]], Iterable[Sequence[int]]] | None = None,
) -> FastEncoder:
    """The fast encoder of an adapter, or one with another engine or library."""
    return FastEncoder(
        choice,
        build=build or adapter._build_engine,
        reference=reference or adapter._encode_batch,
        table=adapter._table,
        pieces=adapter.vocab,
        where=adapter._fast._where,
    )


def assert_same_ids(encoder: FastEncoder, adapter: TableTokenizer, texts: Sequence[str]) -> None:
    """The engine gives the library's ids, in a batch large enough that it is used."""
    texts = [*texts, FILLER]
    ids, offsets = encoder.encode_batch(texts)
    assert encoder.is_fast, encoder.refusal
    expected, expected_offsets = flat_ids(adapter._encode_batch(texts))
    np.testing.assert_array_equal(offsets, expected_offsets)
    np.testing.assert_array_equal(ids, expected)

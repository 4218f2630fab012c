"""HuggingFace fast tokenizers, straight from ``tokenizer.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_ext.errors import MissingDependencyError, TokenizerError
from megatron_ext.tokenizers.base import IdArray
from megatron_ext.tokenizers.file_kind import require_library
from megatron_ext.tokenizers.libraries.huggingface_file import HuggingFaceFile
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.token_bytes import character_starts, settle_ends, utf8


class HuggingFaceTokenizer(TableTokenizer):
    """One ``tokenizer.json``, read with the tokenizers library.

    transformers is not used: ``AutoTokenizer`` on a directory rebuilds the pipeline from the name
    in ``tokenizer_class`` and can silently change the ids. The file alone is the tokenizer.

    Args:
        path: The file, or a directory that holds it.
        include_special_tokens: Add what the post-processor adds to a text: BOS, EOS, [CLS].

    Raises:
        TokenizerError: There is no ``tokenizer.json``, or it is broken.
        MissingDependencyError: tokenizers is not installed.
    """

    library: ClassVar[str] = "huggingface"

    def __init__(
        self, path: str | os.PathLike[str], *, include_special_tokens: bool = False
    ) -> None:
        self._file = require_library(path, "huggingface").file
        contents = HuggingFaceFile(self._file)
        self._add_special = include_special_tokens
        self._text_only = _build(contents.text_only(), self._file)
        super().__init__(
            pieces=contents.pieces(),
            token_bytes=contents.token_bytes(),
            special_ids=contents.special_ids(),
            dummy_prefix=contents.dummy_prefix(),
        )

    def text_to_ids_batch(self, texts: Sequence[str]) -> list[IdArray]:
        for text in texts:
            utf8(text)
        encode = getattr(self._text_only, "encode_batch_fast", self._text_only.encode_batch)
        batch = encode(list(texts), add_special_tokens=self._add_special)
        return [np.array(row.ids, np.int32) for row in batch]

    def ids_to_text(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        known = self._table.as_ids(ids).tolist()
        return str(self._whole.decode(known, skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str, *, parse_special: bool) -> tuple[list[int], Any]:
        tokenizer = self._whole if parse_special else self._text_only
        encoding = tokenizer.encode(text, add_special_tokens=self._add_special)
        return encoding.ids, encoding

    def _locate(
        self, text: str, raw: bytes, encoded: Any, *, parse_special: bool
    ) -> tuple[list[int], list[int]]:
        ids: list[int] = encoded.ids
        spans: list[tuple[int, int]] = encoded.offsets
        if len(raw) != len(text):
            byte_of = character_starts(raw).tolist()
            spans = [(byte_of[start], byte_of[end]) for start, end in spans]
        table = self._written_table if parse_special else self._table
        return ids, settle_ends(spans, [table.rows[i] for i in ids], raw)

    @cached_property
    def _whole(self) -> Any:
        """The tokenizer that knows special tokens in text; built when one is first asked for."""
        return _build(HuggingFaceFile(self._file).whole(), self._file)


def _build(document: dict[str, Any], file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingDependencyError(
            "tokenizers", extra="huggingface", feature="a HuggingFace tokenizer"
        ) from None
    try:
        return Tokenizer.from_str(json.dumps(document))
    except Exception as error:
        # The library raises bare Exceptions.
        raise TokenizerError(
            "the tokenizers library cannot build the tokenizer", got=str(error), where=file
        ) from error

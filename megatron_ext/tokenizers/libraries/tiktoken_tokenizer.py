"""tiktoken: Megatron's JSON rank list, Mistral's Tekken file and base64 rank files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from megatron_ext.errors import MissingDependencyError, TokenizerError
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.libraries.tiktoken_file import TiktokenVocabulary, read_vocabulary
from megatron_ext.tokenizers.special_names import conventional_ids


class TiktokenTokenizer(TableTokenizer):
    """One rank list.

    In a JSON file the special tokens have ids 0 to ``num_special_tokens - 1`` and the ordinary
    tokens follow in rank order; in a base64 rank file the ids are the ranks and the special tokens
    follow. Names are filled up with ``<SPECIAL_i>``.

    Args:
        path: A JSON rank list, ``tekken.json``, a ``.tiktoken`` file or Llama's rank file.
        pattern: How text is cut before merging: ``v1``, ``v2`` or a regular expression. A Tekken
            file brings its own; for the others the default is ``v2``.
        vocab_size: Ids, special tokens included; the ranks beyond are cut off. The default is what
            a Tekken file says, at most 2**17 for a JSON list, and everything for a rank file.
        num_special_tokens: Ids kept for special tokens; 1000 unless a Tekken file says otherwise.
        special_tokens: Their names, in id order; a Tekken file brings its own.

    Raises:
        TokenizerError: The file is missing, broken or of another library, or an option does not
            fit it.
        MissingDependencyError: tiktoken is not installed.
    """

    library: ClassVar[str] = "tiktoken"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int | None = None,
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        vocabulary = read_vocabulary(
            path,
            pattern=pattern,
            vocab_size=vocab_size,
            num_special_tokens=num_special_tokens,
            special_tokens=special_tokens,
        )
        self._encoding = _encoding(vocabulary)
        token_bytes: list[bytes | None] = [None] * vocabulary.vocab_size
        pieces = [""] * vocabulary.vocab_size
        for token, token_id in vocabulary.ids.items():
            token_bytes[token_id] = token
            # A token may end inside a character; its display string then shows the bytes.
            pieces[token_id] = token.decode(errors="backslashreplace")
        for name, token_id in vocabulary.special_ids.items():
            pieces[token_id] = name
        super().__init__(
            pieces=pieces,
            token_bytes=token_bytes,
            files={vocabulary.file.name: vocabulary.file},
            special_ids=conventional_ids(vocabulary.special_ids.get),
            dummy_prefix="none",
        )

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        threads = min(8, os.cpu_count() or 1)
        batch: list[list[int]] = self._encoding.encode_ordinary_batch(
            list(texts), num_threads=threads
        )
        return batch

    def _encode(self, text: str) -> tuple[list[int], None]:
        return self._encoding.encode_ordinary(text), None

    @property
    def _fillers(self) -> frozenset[str]:
        return frozenset(f"<SPECIAL_{i}>" for i in range(self.vocab_size))

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._decode_stretches(
            ids,
            lambda run: self._table.join(run).tobytes().decode(errors="replace"),
            self._table.is_control,
            skip_special_tokens=skip_special_tokens,
        )

    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        raise TokenizerError(
            "the pattern leaves out part of the text",
            got=repr(self._encoding._pat_str),
            expected="a pattern whose matches cover any text",
            fix=r"add |\s+|. to its end",
        )


def _encoding(vocabulary: TiktokenVocabulary) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise MissingDependencyError(
            "tiktoken", extra="tiktoken", feature="a tiktoken vocabulary"
        ) from None
    try:
        return tiktoken.Encoding(
            name=vocabulary.file.name,
            pat_str=vocabulary.pattern,
            mergeable_ranks=vocabulary.ids,
            special_tokens=vocabulary.special_ids,
        )
    except ValueError as error:
        raise TokenizerError(
            "tiktoken cannot use the pattern",
            got=f"{vocabulary.pattern!r}: {error}",
            expected="v1, v2 or a regular expression",
            where="pattern",
        ) from error

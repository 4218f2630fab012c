"""A text aligner that tokenizes and aligns no text twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from megatron_ext.preprocessing.tokenizer_identity import tokenizer_identity
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText
from megatron_ext.training.cross_tokenizer.aligning.text_aligner import TextAligner
from megatron_ext.training.cross_tokenizer.cache.record_store import KEY_BYTES, RecordStore
from megatron_ext.training.cross_tokenizer.cache.text_record import from_record, to_record
from megatron_ext.version import __version__

_FORMAT: Final = 1
"""Of the records; another one makes them all anew."""


class CachedAligner(TextAligner):
    """Keeps what it makes of a text in files, by the text's content.

    The key is a hash of the text and of all that its tokens depend on, so texts may move between
    files and corpora. Any number of processes may share a folder.

    Args:
        student_tokenizer: The student's.
        teacher_tokenizers: Those of teachers that have another one.
        cache_dir: Where the folders of all combinations of tokenizers are.
        max_bytes: Size of one of them from which on nothing is added. A student token takes 5 to 6
            bytes with one teacher, and a teacher token 4 to 5.
    """

    def __init__(
        self,
        student_tokenizer: MegatronTokenizerText,
        teacher_tokenizers: Sequence[MegatronTokenizerText] = (),
        *,
        cache_dir: str | Path,
        max_bytes: int,
    ) -> None:
        super().__init__(student_tokenizer, teacher_tokenizers)
        tokenizers = [student_tokenizer, *teacher_tokenizers]
        name = _name([tokenizer_identity(tokenizer) for tokenizer in tokenizers])
        self._store = RecordStore(Path(cache_dir) / name, max_bytes=max_bytes)
        self._teacher_count = len(teacher_tokenizers)

    def align(self, texts: Sequence[str]) -> list[AlignedText]:
        """``TextAligner.align``, and from the files what is there."""
        keys = [hashlib.blake2b(utf8(text), digest_size=KEY_BYTES).digest() for text in texts]
        found = {key: self._stored(key) for key in keys}
        if None in found.values():
            self._store.refresh()
            found |= {key: self._stored(key) for key, text in found.items() if text is None}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if found[key] is None}
        for key, aligned in zip(missing, super().align(list(missing.values())), strict=True):
            self._store.add(key, to_record(aligned))
            found[key] = aligned
        return [text for key in keys if (text := found[key]) is not None]

    def _stored(self, key: bytes) -> AlignedText | None:
        record = self._store.get(key)
        return None if record is None else from_record(record, self._teacher_count)


def _name(identities: Sequence[Mapping[str, str]]) -> str:
    content = {"version": f"{__version__}, {_FORMAT}", "tokenizers": list(identities)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

"""An aligner that tokenizes and aligns nothing twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from megatron_ext.preprocessing.tokenizer_identity import tokenizer_identity
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import utf8
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText
from megatron_ext.training.cross_tokenizer.aligning.aligner import Aligner, Content
from megatron_ext.training.cross_tokenizer.cache.record_store import KEY_BYTES
from megatron_ext.training.cross_tokenizer.cache.text_record import from_records, to_record
from megatron_ext.version import __version__

_FORMAT: Final = 3
"""Of the records; another one makes them all anew."""


class Store(Protocol):
    """Where records are."""

    def get(self, key: bytes) -> bytes | None: ...
    def refresh(self) -> None: ...
    def add(self, key: bytes, record: bytes) -> None: ...


class CachedAligner:
    """Keeps what an aligner makes, by content, so texts may move between files and corpora.

    Args:
        aligner: What makes it.
        store: Records of this combination of tokenizers alone.
        teacher_count: Teachers that have another tokenizer than the student.
    """

    def __init__(self, aligner: Aligner, store: Store, *, teacher_count: int) -> None:
        self._aligner = aligner
        self._store = store
        self._teacher_count = teacher_count

    def align(self, contents: Sequence[Content]) -> list[AlignedText]:
        """``Aligner.align``, and from the store what is there."""
        keys = [_key(content) for content in contents]
        records = {key: self._store.get(key) for key in keys}
        if None in records.values():
            self._store.refresh()
            lacking = [key for key, record in records.items() if record is None]
            records |= {key: self._store.get(key) for key in lacking}
        found = {key: record for key, record in records.items() if record is not None}
        aligned = dict(
            zip(found, from_records(list(found.values()), self._teacher_count), strict=True)
        )
        missing = {
            key: content for key, content in zip(keys, contents, strict=True) if key not in aligned
        }
        for key, text in zip(missing, self._aligner.align(list(missing.values())), strict=True):
            self._store.add(key, to_record(text))
            aligned[key] = text
        return [aligned[key] for key in keys]


def cache_folder(
    cache_dir: str | Path,
    student_tokenizer: MegatronTokenizerText,
    teacher_tokenizers: Sequence[MegatronTokenizerText],
) -> Path:
    """The folder of a combination of tokenizers: named by all that tokens depend on but text."""
    tokenizers = [student_tokenizer, *teacher_tokenizers]
    content = {
        "version": f"{__version__}, {_FORMAT}",
        "tokenizers": [tokenizer_identity(tokenizer) for tokenizer in tokenizers],
    }
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return Path(cache_dir) / name


def _key(content: Content) -> bytes:
    if isinstance(content, str):
        return hashlib.blake2b(utf8(content), digest_size=KEY_BYTES).digest()
    written = json.dumps([content.messages, content.template_variables], default=dict)
    return hashlib.blake2b(written.encode(), digest_size=KEY_BYTES, person=b"conversation").digest()

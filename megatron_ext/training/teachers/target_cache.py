"""A cache of a teacher's targets: its manifest, ``cache.json``, and its reader, by keys of windows.

The manifest has form, identity and files, and whether all are there. F files, W windows, N tokens
of all of them, L tokens of one, R bytes of a record.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.files import read_json, write_text
from megatron_ext.teachers.formed_targets import Records
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.run_folder import config_leaves
from megatron_ext.training.teachers.shard_file import (
    HEADER_BYTES,
    KEY_BYTES,
    WINDOW_BYTES,
    ShardHead,
    read_head,
)

MANIFEST_FILE: Final = "cache.json"
HEAD_FILE: Final = "head.safetensors"
"""The teacher's head, beside hidden states."""

_FORMAT: Final = 1
_OTHERS: Final = "other tokenizers"
_WORDS: Final = {_OTHERS: "one of the other tokenizers", "lengths": "length of rows"}
"""What errors say in the place of keys of an identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of ``cache.json``."""

    form: TargetForm

    identity: Mapping[str, Any]
    """Hashes of teacher, tokenizers and settings, nested plain values; ``data`` are the hashes of
    the texts, of which a run may read a part."""

    shards: tuple[str, ...]
    """Names of the files, in order."""

    block_bytes: int
    """Least bytes of text of a file."""

    imported: Mapping[str, Any] | None = None
    """Format, hashes and tail of the recordings of another program; None for a recording of the
    teacher itself."""

    is_complete: bool = False

    windows: int = 0
    tokens: int = 0
    """Numbers over all files of a complete cache; 0 before."""

    digest: bytes = field(init=False)
    """32 bytes, the same for all files of a cache and for no other."""

    def __post_init__(self) -> None:
        content = json.dumps(self._of(), sort_keys=True).encode()
        object.__setattr__(self, "digest", hashlib.sha256(content).digest())

    @property
    def size(self) -> int:
        """Bytes of all files of targets: ``64 F + 24 W + R N``."""
        heads = HEADER_BYTES * len(self.shards) + WINDOW_BYTES * self.windows
        return heads + self.form.bytes_per_token * self.tokens

    def save(self, folder: Path) -> None:
        """Write it in one step."""
        values = self._of() | {
            "is_complete": self.is_complete,
            "windows": self.windows,
            "tokens": self.tokens,
            "bytes_per_token": self.form.bytes_per_token,
            "bytes": self.size if self.is_complete else None,
        }
        write_text(folder / MANIFEST_FILE, json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """The manifest of the cache in a folder.

        Raises:
            ConfigError: There is no cache in the folder.
            CheckpointError: ``cache.json`` is not what was written.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise ConfigError(
                "there is no cache of a teacher",
                got=str(folder),
                expected=f"a folder with a {MANIFEST_FILE}",
                fix="make one with megatron-ext cache-teacher",
            )
        try:
            values = read_json(path)
            if values["format"] != _FORMAT:
                raise ValueError(f"format {values['format']}")
            return cls(
                form=TargetForm(**values["form"]),
                identity=values["identity"],
                shards=tuple(values["shards"]),
                block_bytes=values["block_bytes"],
                imported=values.get("imported"),
                is_complete=values["is_complete"],
                windows=values["windows"],
                tokens=values["tokens"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "the description of a teacher's cache cannot be read",
                where=path,
                got=str(error),
                fix="make the cache again with megatron-ext cache-teacher, in another folder",
            ) from error

    def completed(self, *, windows: int, tokens: int) -> Manifest:
        """The manifest of the complete cache."""
        return replace(self, is_complete=True, windows=windows, tokens=tokens)

    def head(self, folder: Path, name: str) -> ShardHead:
        """The head of a file of the cache.

        Raises:
            CheckpointError: As ``read_head``.
        """
        width = self.form.bytes_per_token
        return read_head(folder / name, bytes_per_token=width, digest=self.digest)

    def check_complete(self, folder: Path) -> None:
        """Check that all files were recorded.

        Raises:
            CheckpointError: Some are missing.
        """
        if self.is_complete:
            return
        present = sum((folder / name).exists() for name in self.shards)
        raise CheckpointError(
            "the teacher's cache is not finished",
            where=folder,
            got=f"{present} of {len(self.shards)} files",
            fix="start megatron-ext cache-teacher again with the same --output: it goes on",
        )

    def check_same(self, other: Mapping[str, Any], folder: Path) -> None:
        """Check that the cache has the identity ``other``, whose texts may be a part of its texts.

        Raises:
            ConfigError: It is of another teacher, tokenizer, window or text.
        """
        recorded, wanted = dict(config_leaves(self.identity)), dict(config_leaves(other))
        for key in sorted(recorded.keys() | wanted.keys()):
            before, now = recorded.get(key), wanted.get(key)
            is_same = before == now
            if key == "data":
                is_same = set(now or ()) <= set(before or ())
            if key == _OTHERS:
                # Texts are cut alike however many models have a tokenizer, the teacher included.
                own = wanted.get("teacher tokenizer")
                is_same = {*(now or ()), own} == {*(before or ()), own}
            if is_same:
                continue
            raise ConfigError(
                f"the teacher's cache was made with another {_WORDS.get(key, key)}",
                where=folder,
                got=_short(now),
                expected=_short(before),
                fix="make a cache of this configuration with megatron-ext cache-teacher, or take "
                "the configuration of the cache",
            )

    def _of(self) -> dict[str, Any]:
        values = {
            "format": _FORMAT,
            "form": self.form.values(),
            "identity": dict(self.identity),
            "shards": list(self.shards),
            "block_bytes": self.block_bytes,
        }
        return values if self.imported is None else {**values, "imported": dict(self.imported)}


def _short(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(v[:12] if isinstance(v, str) and len(v) == 64 else str(v) for v in values)


class TargetCache:
    """A complete cache, whose files are mapped and read window by window.

    Attributes:
        folder: Folder of the cache.
        manifest: Its description: form, identity and files.
        form: Form of the targets.

    Raises:
        CheckpointError: A file is missing, cut off or of another cache.
        ConfigError: There is no cache in the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        self.manifest.check_complete(self.folder)
        self.form = self.manifest.form
        self._paths = [self.folder / name for name in self.manifest.shards]
        self._maps: dict[int, NDArray[np.uint8]] = {}
        heads = [self.manifest.head(self.folder, name) for name in self.manifest.shards]
        window_count = sum(len(head.windows) for head in heads)
        token_count = sum(head.tokens for head in heads)
        if (window_count, token_count) != (self.manifest.windows, self.manifest.tokens):
            raise CheckpointError(
                "the files of the teacher's cache are not those that it was finished with",
                where=self.folder / MANIFEST_FILE,
                got=f"{window_count} windows of {token_count} tokens",
                expected=f"{self.manifest.windows} of {self.manifest.tokens}",
                fix="make it again with megatron-ext cache-teacher, in another folder",
            )
        # In the order of keys: 16 bytes as two numbers, the first of which is found by bisection.
        windows = np.concatenate([head.windows for head in heads])
        keys = np.ascontiguousarray(windows["key"]).view(np.uint64).reshape(-1, 2)
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        self._keys = keys[order]
        self._tokens = windows["tokens"][order].astype(np.int64)
        self._crc = windows["crc"][order]
        width, sizes = self.form.bytes_per_token, [len(head.windows) for head in heads]
        self._shard = np.repeat(np.arange(len(heads)), sizes)[order]
        starts = []
        for head in heads:
            tokens = head.windows["tokens"].astype(np.int64)
            starts.append(head.first_record + width * (np.cumsum(tokens) - tokens))
        self._start = np.concatenate(starts)[order]

    def records(self, key: bytes, length: int) -> Records:
        """The records of a window, [L, R].

        Args:
            key: 16 bytes.
            length: L

        Raises:
            DataError: The cache does not have the window.
            CheckpointError: The records are not those that were written.
        """
        assert len(key) == KEY_BYTES
        entry = self._entry(key)
        if entry is None or self._tokens[entry] != length:
            raise DataError(
                "the teacher's cache has no targets of a window of this run",
                where=self.folder,
                got=f"a window of {length} tokens with key {key.hex()}",
                fix="make a cache of this run's data with megatron-ext cache-teacher",
            )
        width, start = self.form.bytes_per_token, int(self._start[entry])
        shard = int(self._shard[entry])
        content = self._map(shard)[start : start + width * length]
        if zlib.crc32(content.data) != self._crc[entry]:
            raise CheckpointError(
                "the teacher's cache is damaged",
                where=self._paths[shard],
                got=f"other bytes at {start} than were written",
                fix="remove the file and run megatron-ext cache-teacher again",
            )
        return content.reshape(length, width)

    def head(self, shard: VocabShard) -> torch.Tensor:
        """[Vp, D] this rank's rows of the teacher's head, zeros for padding.

        Only a cache of hidden states has it.

        Raises:
            CheckpointError: It is missing or of another shape.
        """
        path = self.folder / HEAD_FILE
        try:
            with safe_open(path, framework="pt") as file:
                head: Any = file.get_slice("head")
                rows, width = head.get_shape()
                if (rows, width) != (self.form.vocab_size, self.form.count):
                    raise ValueError(f"shape {rows} x {width}")
                first = min(shard.start, rows)
                local: torch.Tensor = head[first : first + shard.valid_width]
        except Exception as error:
            raise CheckpointError(
                "the teacher's head cannot be read from its cache",
                where=path,
                got=str(error),
                expected=f"{self.form.vocab_size} x {self.form.count}",
                fix="remove the file and run megatron-ext cache-teacher again",
            ) from error
        return torch.nn.functional.pad(local, (0, 0, 0, shard.width - len(local)))

    def _entry(self, key: bytes) -> int | None:
        """The last entry of a key, in the order of the files."""
        first, second = np.frombuffer(key, np.uint64)
        place = int(np.searchsorted(self._keys[:, 0], first))
        found = None
        while place < len(self._keys) and self._keys[place, 0] == first:
            if self._keys[place, 1] == second:
                found = place
            place += 1
        return found

    def _map(self, shard: int) -> NDArray[np.uint8]:
        if shard not in self._maps:
            self._maps[shard] = np.memmap(self._paths[shard], np.uint8, mode="r")
        return self._maps[shard]

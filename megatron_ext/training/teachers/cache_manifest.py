"""The manifest of a cache, ``cache.json``: form, identity and files, and whether all are there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import read_json, write_text
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.run_folder import config_leaves
from megatron_ext.training.teachers.shard_file import HEADER_BYTES, WINDOW_BYTES

MANIFEST_FILE: Final = "cache.json"
HEAD_FILE: Final = "head.safetensors"
"""The teacher's head, beside hidden states."""

_FORMAT: Final = 1


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
            if is_same:
                continue
            raise ConfigError(
                f"the teacher's cache was made with another {key}",
                where=folder,
                got=_short(now),
                expected=_short(before),
                fix="make a cache of this configuration with megatron-ext cache-teacher, or take "
                "the configuration of the cache",
            )

    def _of(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "form": self.form.values(),
            "identity": dict(self.identity),
            "shards": list(self.shards),
            "block_bytes": self.block_bytes,
        }


def _short(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(v[:12] if isinstance(v, str) and len(v) == 64 else str(v) for v in values)

"""A cache of a teacher's targets, read by the keys of windows.

W windows, L tokens of one, R bytes of a record.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import CheckpointError, DataError
from megatron_ext.teachers.formed_targets import Records
from megatron_ext.training.teachers.cache_manifest import HEAD_FILE, MANIFEST_FILE, Manifest
from megatron_ext.training.teachers.shard_file import KEY_BYTES, read_head


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
        heads = [
            read_head(path, bytes_per_token=self.form.bytes_per_token, digest=self.manifest.digest)
            for path in self._paths
        ]
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
        first, second = np.frombuffer(key, np.uint64)
        place = int(np.searchsorted(self._keys[:, 0], first))
        while place < len(self._keys) and self._keys[place, 0] == first:
            if self._keys[place, 1] == second:
                return place
            place += 1
        return None

    def _map(self, shard: int) -> NDArray[np.uint8]:
        if shard not in self._maps:
            self._maps[shard] = np.memmap(self._paths[shard], np.uint8, mode="r")
        return self._maps[shard]

"""One file of a cache: windows by their keys, and a record for each token. W windows, N tokens.

All numbers are little-endian::

    header    64 bytes   magic, record width, W, N, digest of the cache's identity
    windows   24 W       key (16), tokens (4), CRC-32 of the window's records (4)
    records   R N        token after token, window after window

so that a file has ``64 + 24 W + R N`` bytes. It is written whole or not at all.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import CheckpointError
from megatron_ext.files import write_bytes
from megatron_ext.teachers.target_records import Records

KEY_BYTES: Final = 16
HEADER_BYTES: Final = 64
WINDOW_BYTES: Final = 24

_MAGIC: Final = b"MXTARGT1"
_HEADER: Final = struct.Struct("<8sQQQ32s")
WINDOW: Final = np.dtype([("key", "V16"), ("tokens", "<u4"), ("crc", "<u4")])

Windows = NDArray[np.void]
"""[W] of ``WINDOW``"""


class Window(NamedTuple):
    """What a shard is written of."""

    key: bytes
    records: Records
    """[L, R]"""


class ShardHead(NamedTuple):
    """What stands before the records."""

    windows: Windows
    tokens: int

    @property
    def first_record(self) -> int:
        """Where the records begin, in bytes."""
        return HEADER_BYTES + WINDOW_BYTES * len(self.windows)


def shard_size(*, windows: int, tokens: int, bytes_per_token: int) -> int:
    """Bytes of a file."""
    return HEADER_BYTES + WINDOW_BYTES * windows + bytes_per_token * tokens


def write_shard(
    path: Path, windows: Sequence[Window], *, bytes_per_token: int, digest: bytes
) -> None:
    """Write a file in one step.

    Args:
        digest: 32 bytes of what the cache is of.
    """
    tokens = sum(len(window.records) for window in windows)
    table = np.zeros(len(windows), WINDOW)
    contents = []
    for row, window in zip(table, windows, strict=True):
        content = window.records.tobytes()
        row["key"], row["tokens"] = np.void(window.key), len(window.records)
        row["crc"] = zlib.crc32(content)
        contents.append(content)
    header = _HEADER.pack(_MAGIC, bytes_per_token, len(windows), tokens, digest)
    write_bytes(path, b"".join([header, table.tobytes(), *contents]))


def read_head(path: Path, *, bytes_per_token: int, digest: bytes) -> ShardHead:
    """What a file holds, once it is known to be whole and of this cache.

    Raises:
        CheckpointError: It is missing, cut off, or of another cache.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                raise _broken(path, "no file of cached targets", f"{len(header)} bytes of header")
            _, width, count, tokens, of = _HEADER.unpack(header)
            if of != digest or width != bytes_per_token:
                raise _broken(path, "a file of another cache", "another identity")
            expected = shard_size(windows=count, tokens=tokens, bytes_per_token=width)
            size = path.stat().st_size
            if size != expected:
                raise _broken(path, "a file that is cut off", f"{size} bytes", f"{expected}")
            windows = np.frombuffer(file.read(WINDOW_BYTES * count), WINDOW)
    except OSError as error:
        raise _broken(path, "a file that cannot be read", str(error)) from error
    return ShardHead(windows, tokens)


def _broken(path: Path, what: str, got: str, expected: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"the teacher's cache has {what}",
        where=path,
        got=got,
        expected=expected,
        fix="remove the file and run megatron-ext cache-teacher again: it makes what is missing",
    )

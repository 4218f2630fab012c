"""One file of a cache, and the windows of a microbatch that it is looked up by.

All numbers are little-endian::

    header    64 bytes   magic, record width, W, N, digest of the cache's identity
    windows   24 W       key (16), tokens (4), CRC-32 of the window's records (4)
    records   R N        token after token, window after window

so that a file has ``64 + 24 W + R N`` bytes. It is written whole or not at all.

A window is a sequence that a model reads at once: a text, a piece of one, or a conversation.
Windows that share a row do not attend to one another, so a teacher's targets of one depend on its
tokens alone, and its key is their hash: the row, microbatch, rank or epoch does not matter.

W windows, N tokens, L labels of a window, B rows, T positions, R bytes of a record.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.batch import Layout
from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.data.side import Segment
from megatron_ext.errors import CheckpointError
from megatron_ext.files import write_bytes
from megatron_ext.teachers.formed_targets import Records

KEY_BYTES: Final = 16
HEADER_BYTES: Final = 64
WINDOW_BYTES: Final = 24

_MAGIC: Final = b"MXTARGT1"
_HEADER: Final = struct.Struct("<8sQQQ32s")
WINDOW: Final = np.dtype([("key", "V16"), ("tokens", "<u4"), ("crc", "<u4")])

Windows = NDArray[np.void]
"""[W] of ``WINDOW``"""


class Window(NamedTuple):
    """Key and records of a window to be written."""

    key: bytes
    records: Records
    """[L, R]"""


class ShardHead(NamedTuple):
    """The part of a file before its records."""

    windows: Windows
    tokens: int

    @property
    def first_record(self) -> int:
        """Offset of the records, in bytes."""
        return HEADER_BYTES + WINDOW_BYTES * len(self.windows)


def write_shard(
    path: Path, windows: Sequence[Window], *, bytes_per_token: int, digest: bytes
) -> None:
    """Write a file in one step.

    Args:
        digest: 32 bytes, of the cache's manifest.
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
    """Read the head of a file, and check that the file is whole and of this cache.

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
            expected = HEADER_BYTES + WINDOW_BYTES * count + width * tokens
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


_ID: Final = np.dtype("<i4")


class PlacedWindow(NamedTuple):
    """One window of a microbatch."""

    key: bytes

    start: int
    """First position, in rows laid one after the other."""

    length: int
    """L"""


class PlacedWindows(NamedTuple):
    """All windows of a microbatch that predict something."""

    windows: list[PlacedWindow]
    row_count: int
    """B"""
    row_length: int
    """T"""

    @classmethod
    def of(
        cls,
        samples: Sequence[PackedSample],
        collator: CrossTokenizerCollator,
        teacher: str,
    ) -> PlacedWindows:
        """The windows where the collator places them.

        Args:
            samples: Rows of the microbatch.
            teacher: Name of the teacher.
        """
        index = collator.side_index(teacher)
        side = collator.sides[index]
        rows = [[Segment.of(piece, index, side) for piece in sample.pieces] for sample in samples]
        layout = Layout.of(rows, side)
        return cls(list(_placed(layout)), layout.row_count, layout.row_length)


def window_key(segment: Segment) -> bytes:
    """16 bytes, the hash of a window's input ids and labels."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (*segment.inputs(), *segment.labels()):
        digest.update(part.astype(_ID, copy=False).tobytes())
    return digest.digest()


def _placed(layout: Layout) -> Iterator[PlacedWindow]:
    starts, lengths = layout.starts.tolist(), layout.label_counts.tolist()
    for segment, start, length in zip(layout.segments, starts, lengths, strict=True):
        if length:
            yield PlacedWindow(window_key(segment), start, length)

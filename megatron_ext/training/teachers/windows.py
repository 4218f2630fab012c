"""The windows of a microbatch as a teacher reads them, and where they stand in its rows.

A window is what a model reads at once: a text, a piece of one, or a conversation. Windows that
share a row do not see one another, so a teacher's targets of one depend on its tokens alone, and
its key is their hash: which row, microbatch, rank or epoch it comes in does not matter.

L labels of a window, B rows, T positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from megatron_ext.data.aligned_text import PackedSample
from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.data.layout import Layout
from megatron_ext.data.side import Parts, Segment, Side
from megatron_ext.training.teachers.shard_file import KEY_BYTES

_ID: Final = np.dtype("<i4")


class PlacedWindow(NamedTuple):
    """One window of a microbatch."""

    key: bytes

    start: int
    """Its first position where rows follow one another."""

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
        batch: CrossTokenizerBatch,
        sides: Sequence[Side],
        teacher: str,
    ) -> PlacedWindows:
        """As the collator lays them out.

        Args:
            samples: The rows.
            batch: What the collator made of them.
            sides: The collator's.
            teacher: By name.
        """
        index = side_index(batch, teacher)
        rows = [
            [Segment.of(piece, index, sides[index]) for piece in sample.pieces]
            for sample in samples
        ]
        layout = Layout.of(rows, sides[index])
        return cls(list(_placed(layout)), layout.row_count, layout.row_length)


def side_index(batch: CrossTokenizerBatch, teacher: str) -> int:
    """Which of the collator's sides a teacher reads: the student's where it has its tokenizer."""
    others = [name for name, side in batch.teachers.items() if side is not batch.student]
    return 1 + others.index(teacher) if teacher in others else 0


def window_key(segment: Segment) -> bytes:
    """16 bytes of what is read and what is asked for."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for parts in (segment.inputs(), segment.labels()):
        digest.update(_joined(parts))
    return digest.digest()


def _placed(layout: Layout) -> Iterator[PlacedWindow]:
    starts, lengths = layout.starts.tolist(), layout.label_counts.tolist()
    for segment, start, length in zip(layout.segments, starts, lengths, strict=True):
        if length:
            yield PlacedWindow(window_key(segment), start, length)


def _joined(parts: Parts) -> bytes:
    return b"".join(part.astype(_ID, copy=False).tobytes() for part in parts)

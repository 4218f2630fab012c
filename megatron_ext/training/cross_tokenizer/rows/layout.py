"""Where the labels of a batch stand in the rows of one side.

B rows, T label positions, S segments, L labels of all segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.training.cross_tokenizer.rows.segment import Parts, Segment
from megatron_ext.training.cross_tokenizer.rows.side import Side

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Segments one after another in B rows, which follow one another too."""

    segments: list[Segment]
    """S"""

    row_count: int
    """B"""

    row_length: int
    """T"""

    label_counts: Counts
    """[S]"""

    lengths: Counts
    """[S] positions that each takes; a segment may have fewer labels."""

    row_of: Counts
    """[S]"""

    @classmethod
    def of(cls, rows: Sequence[Sequence[Segment]], side: Side) -> Layout:
        """The layout of B rows of segments."""
        segments = list(chain.from_iterable(rows))
        labels = np.array([segment.label_count for segment in segments], np.int64)
        lengths = -(-labels // side.segment_multiple) * side.segment_multiple
        row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        longest = int(np.bincount(row_of, lengths, len(rows)).max(initial=0))
        assert longest <= side.length, f"a row of {side.name} overflows"
        return cls(segments, len(rows), side.row_length(longest), labels, lengths, row_of)

    @cached_property
    def filled(self) -> Counts:
        """[B] positions of each row before its padding."""
        return np.bincount(self.row_of, self.lengths, self.row_count).astype(np.int64)

    @cached_property
    def starts(self) -> Counts:
        """[S] where each segment begins."""
        rows_before = np.cumsum(self.filled) - self.filled
        before = np.cumsum(self.lengths) - self.lengths
        return before + (np.arange(self.row_count) * self.row_length - rows_before)[self.row_of]

    @cached_property
    def bounds(self) -> Counts:
        """[G + 1] where segments begin and end; the padding of a row is one."""
        row_starts = np.arange(self.row_count + 1) * self.row_length
        ends = row_starts[:-1] + self.filled
        begins = self.starts[self.lengths > 0]
        bounds: Counts = np.unique(np.concatenate([row_starts, ends, begins]))
        return bounds

    def laid_out(
        self, parts: Iterable[Parts], fill: int, kind: type[np.generic] = np.int64
    ) -> NDArray[Any]:
        """Values for each label, in their places [B, T], and ``fill`` elsewhere.

        Args:
            parts: S tuples of arrays, which together are one value for each label of a segment.
            fill: For positions without a label.
            kind: Of the result.
        """
        fills = np.full(max(self._gaps), fill, kind)
        placed = [fills[: self._gaps[0]]]
        for values, gap in zip(parts, self._gaps[1:], strict=True):
            placed.extend(values)
            if gap:
                placed.append(fills[:gap])
        rows: NDArray[Any] = np.concatenate(placed, dtype=kind)
        return rows.reshape(self.row_count, self.row_length)

    @cached_property
    def _gaps(self) -> list[int]:
        """[S + 1] positions before the first segment, and behind the labels of each."""
        stops = np.append(self.starts, self.row_count * self.row_length)
        gaps: list[int] = (stops - np.append(0, self.starts + self.label_counts)).tolist()
        return gaps

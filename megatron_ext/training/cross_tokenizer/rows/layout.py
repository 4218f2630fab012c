"""Samples of one side as the rows of a batch.

B rows, T label positions, S segments, L labels of all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import Ids
from megatron_ext.training.cross_tokenizer.rows.batch import SideBatch
from megatron_ext.training.cross_tokenizer.rows.side import Side

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one side in one piece of a text."""

    ids: Ids
    is_end: bool


@dataclass(frozen=True)
class Layout:
    """Where segments and their labels stand when the rows of a batch follow one another."""

    row_count: int
    """B"""

    row_length: int
    """T"""

    sequences: Counts
    """[S] tokens of each segment with what stands around its text; labels are one fewer."""

    lengths: Counts
    """[S] positions that each takes."""

    row_of: Counts
    """[S]"""

    @classmethod
    def of(cls, rows: Sequence[Sequence[Segment]], side: Side) -> Layout:
        """The layout of B rows, whose segments follow one another."""
        has_lead, has_eod = side.lead is not None, side.eod is not None
        sequences, lengths, row_of = [], [], []
        for index, row in enumerate(rows):
            for segment in row:
                count = len(segment.ids)
                sequences.append(count + has_lead + (has_eod and segment.is_end))
                lengths.append(side.segment_length(count, is_end=segment.is_end))
                row_of.append(index)
        columns = (np.array(column, np.int64) for column in (sequences, lengths, row_of))
        layout = cls(len(rows), side.length, *columns)
        assert layout.filled.max(initial=0) <= side.length, f"a row of {side.name} overflows"
        return layout

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
    def label_places(self) -> Counts:
        """[L] where each label stands."""
        return _ranges(self.starts, np.maximum(self.sequences - 1, 0))

    @cached_property
    def bounds(self) -> Counts:
        """[G + 1] where segments begin and end; the padding of a row is one."""
        row_starts = np.arange(self.row_count + 1) * self.row_length
        ends = row_starts[:-1] + self.filled
        return np.unique(np.concatenate([row_starts, ends, self.starts[self.lengths > 0]]))

    def scattered(self, labels: NDArray[np.integer[Any]], fill: int) -> NDArray[np.int64]:
        """``labels`` [L] in their places [B, T], and ``fill`` elsewhere."""
        rows = np.full(self.row_count * self.row_length, fill, np.int64)
        rows[self.label_places] = labels
        return rows.reshape(self.row_count, self.row_length)


def side_batch(
    rows: Sequence[Sequence[Segment]], side: Side, layout: Layout, byte_count: int
) -> SideBatch:
    """The tensors of one side.

    Args:
        rows: B rows of segments.
        side: Whose.
        layout: Theirs.
        byte_count: Bytes of the texts.
    """
    stream = _stream(rows, side)
    stops = np.cumsum(layout.sequences)[layout.sequences > 0]
    is_read, is_label = np.ones((2, len(stream)), np.bool_)
    is_read[stops - 1] = False
    is_label[(np.cumsum(layout.sequences) - layout.sequences)[layout.sequences > 0]] = False
    labels = torch.from_numpy(layout.scattered(stream[is_label], IGNORE_INDEX))
    bounds = layout.bounds
    sizes = np.diff(bounds)
    positions = np.arange(labels.numel()) - np.repeat(bounds[:-1], sizes)
    return SideBatch(
        input_ids=torch.from_numpy(layout.scattered(stream[is_read], side.pad)),
        labels=labels,
        loss_mask=(labels != IGNORE_INDEX).float(),
        position_ids=torch.from_numpy(positions).view(labels.shape),
        lengths=torch.from_numpy(layout.filled),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(sizes.max(initial=0)),
        byte_count=byte_count,
    )


def _stream(rows: Sequence[Sequence[Segment]], side: Side) -> Ids:
    """All segments one after another, with what stands around their texts."""
    lead = np.array([] if side.lead is None else [side.lead], np.int32)
    eod = np.array([] if side.eod is None else [side.eod], np.int32)
    nothing = eod[:0]
    parts = (
        part
        for segment in chain.from_iterable(rows)
        for part in (lead, segment.ids, eod if segment.is_end else nothing)
    )
    return np.concatenate([nothing, *parts])


def _ranges(starts: Counts, counts: Counts) -> Counts:
    """``starts[i] ... starts[i] + counts[i] - 1`` for each i, one after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())

"""What one model reads of a text, with what stands around it. T tokens, L labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_places import Marks
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import (
    AlignedText,
    Ids,
    Trained,
)
from megatron_ext.training.cross_tokenizer.rows.side import Side

Parts = tuple[NDArray[Any], ...]


class Segment(NamedTuple):
    """Its tokens, and where they are predicted: each at the position before it."""

    ids: Ids
    """[T]"""

    trained: Trained
    """[T]"""

    lead: NDArray[np.int32] | None
    """[1] what is read before the first token; with None that is read and not predicted."""

    eod: NDArray[np.int32] | None
    """[1] what is predicted behind the last token; None for nothing."""

    @classmethod
    def of(cls, piece: AlignedText, index: int, side: Side) -> Segment:
        """A piece as the student (0) or a teacher (from 1) reads it."""
        reader = piece.teachers[index - 1] if index else None
        ids = piece.student_ids if reader is None else reader.ids
        if piece.is_conversation:
            return cls(ids, piece.trained if reader is None else reader.trained, None, None)
        return cls(ids, None, side.lead_part, side.eod_part if piece.is_end else None)

    @property
    def label_count(self) -> int:
        """L"""
        return max(len(self.ids) + (self.eod is not None) - (self.lead is None), 0)

    def inputs(self) -> Parts:
        """Parts of what is read [L]."""
        ids = self.ids if self.eod is not None else self.ids[:-1]
        if self.lead is None:
            return (ids,)
        is_empty = self.eod is None and not len(self.ids)
        return () if is_empty else (self.lead, ids)

    def labels(self) -> Parts:
        """Parts of what is predicted [L], ``IGNORE_INDEX`` where it is not trained."""
        ids = self.ids
        if self.trained is not None:
            ids = np.where(self.trained, ids.astype(np.int64), IGNORE_INDEX)
        return self.at_labels(ids, self.eod)

    def at_labels(self, values: NDArray[Any], at_eod: NDArray[Any] | None) -> Parts:
        """Parts of values [L] of what is predicted.

        Args:
            values: [T] of the tokens.
            at_eod: [1] of what is predicted behind them, where there is that.
        """
        predicted = values if self.lead is not None else values[1:]
        return (predicted,) if self.eod is None or at_eod is None else (predicted, at_eod)

    def reads_first(self, marks: Marks) -> bool:
        """Whether the first token is in a chunk and is not predicted."""
        return self.lead is None and len(marks) > 0 and bool(marks[0])

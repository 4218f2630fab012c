"""One side of a batch: what stands around its texts, and what it reads of each.

T tokens, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_places import Marks
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.aligner import AlignedText, Ids, Trained
from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText


@dataclass(kw_only=True, frozen=True)
class Side:
    """The student, or one teacher.

    A text is read behind a leading token: BOS, or the end-of-document token where there is no BOS.
    Without either its first token leads and is not predicted itself.
    """

    name: str
    """For messages."""

    length: int
    """Label positions of a row."""

    lead: int | None
    """What is read before each piece of a text, and never predicted."""

    eod: int | None
    """What ends each text and is predicted there; None for nothing."""

    pad: int
    """What fills a row."""

    segment_multiple: int = 1
    """What the length of each piece in a row is filled up to a multiple of."""

    row_multiple: int | None = None
    """What the longest row of a batch is filled up to a multiple of, and the others to its length;
    None: every row has ``length`` positions."""

    filled_multiple: int = 1
    """What rows are filled up to a multiple of, beyond ``length`` too, where no text is."""

    def __post_init__(self) -> None:
        for name in ("length", "segment_multiple", "row_multiple", "filled_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"the {name} of {self.name} is too small",
                    got=value,
                    expected=">= 1",
                )
        if self.capacity < 1:
            raise ConfigError(
                f"a row of {self.name} has no room for a token of a text",
                got=f"{self.length} positions",
                fix="raise its length",
            )

    @classmethod
    def of(
        cls,
        tokenizer: MegatronTokenizerText,
        *,
        name: str,
        length: int,
        length_multiple: int,
        segment_multiple: int,
        append_eod: bool,
        pad_id: int | None,
        row_multiple: int | None = None,
        filled_multiple: int = 1,
    ) -> Side:
        """The side of a tokenizer.

        Args:
            tokenizer: It.
            name: For messages.
            length: Most tokens of a row.
            length_multiple: What a row is filled up to a multiple of.
            segment_multiple: What each piece in a row is filled up to a multiple of.
            append_eod: End texts with the end-of-document token, where there is one.
            pad_id: What fills a row; the tokenizer's padding, else its end-of-document token, else
                0 with None.
            row_multiple: What the longest row of a batch is filled up to a multiple of, and the
                others to its length; None: every row to the length of the side.
            filled_multiple: What all rows are filled up to a multiple of besides.
        """
        if length_multiple < 1:
            raise ConfigError(
                f"the length multiple of {name} is too small", got=length_multiple, expected=">= 1"
            )
        pads = (pad_id, tokenizer.pad_id, tokenizer.eod, 0)
        return cls(
            name=name,
            length=-(-length // length_multiple) * length_multiple,
            lead=tokenizer.bos if tokenizer.bos is not None else tokenizer.eod,
            eod=tokenizer.eod if append_eod else None,
            pad=next(pad for pad in pads if pad is not None),
            segment_multiple=segment_multiple,
            row_multiple=row_multiple,
            filled_multiple=filled_multiple,
        )

    @cached_property
    def lead_part(self) -> NDArray[np.int32] | None:
        """``lead`` as a row of one token."""
        return None if self.lead is None else np.array([self.lead], np.int32)

    @cached_property
    def eod_part(self) -> NDArray[np.int32] | None:
        """``eod`` as a row of one token."""
        return None if self.eod is None else np.array([self.eod], np.int32)

    def row_length(self, longest: int) -> int:
        """Positions of the rows of a batch whose longest row fills ``longest`` of them."""
        length = self.length
        if self.row_multiple is not None:
            length = min(-(-max(longest, 1) // self.row_multiple) * self.row_multiple, length)
        return -(-length // self.filled_multiple) * self.filled_multiple

    @property
    def capacity(self) -> int:
        """Most tokens of a text that fit a row, whatever stands around them."""
        room = self.length - self.length % self.segment_multiple
        return room - (self.eod is not None) + (self.lead is None)

    def segment_length(self, token_count: int, *, is_end: bool) -> int:
        """Positions that a piece of ``token_count`` tokens takes.

        Args:
            token_count: Its tokens.
            is_end: Whether a text ends with it.
        """
        labels = token_count + (is_end and self.eod is not None) - (self.lead is None)
        return -(-max(labels, 0) // self.segment_multiple) * self.segment_multiple


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

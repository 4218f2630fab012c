"""A model's side of a batch: row lengths, special tokens and segments. T tokens, L labels."""

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
    """Row lengths and special tokens of the student or of one teacher.

    A leading token precedes each text: BOS, or the end-of-document token where there is no BOS.
    Without either, the first token of the text leads and is not predicted.
    """

    name: str
    """Name for error messages."""

    length: int
    """Label positions of a row."""

    lead: int | None
    """Token read before each piece of a text and never predicted; None for none."""

    eod: int | None
    """Token predicted at the end of each text; None for none."""

    pad: int
    """Id of the padding."""

    segment_multiple: int = 1
    """Multiple that each piece in a row is padded to."""

    row_multiple: int | None = None
    """Multiple that the longest row of a batch is padded to, and the others to the same length;
    None: every row has ``length`` positions."""

    filled_multiple: int = 1
    """Multiple that rows are padded to in addition, if need be beyond ``length``."""

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
        """The side of a model with ``tokenizer``.

        Args:
            tokenizer: Tokenizer of the model.
            name: Name for error messages.
            length: Most tokens of a row.
            length_multiple: Multiple that a row is padded to.
            segment_multiple: Multiple that each piece in a row is padded to.
            append_eod: End texts with the end-of-document token, where there is one.
            pad_id: Id of the padding; None for the tokenizer's padding, else its end-of-document
                token, else 0.
            row_multiple: Multiple that the longest row of a batch is padded to, and the others to
                the same length; None: every row to the length of the side.
            filled_multiple: Multiple that all rows are padded to in addition.
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
        """[1] ``lead`` as an array."""
        return None if self.lead is None else np.array([self.lead], np.int32)

    @cached_property
    def eod_part(self) -> NDArray[np.int32] | None:
        """[1] ``eod`` as an array."""
        return None if self.eod is None else np.array([self.eod], np.int32)

    def row_length(self, longest: int) -> int:
        """Positions of the rows of a batch whose longest row has ``longest`` before padding."""
        length = self.length
        if self.row_multiple is not None:
            length = min(-(-max(longest, 1) // self.row_multiple) * self.row_multiple, length)
        return -(-length // self.filled_multiple) * self.filled_multiple

    @property
    def capacity(self) -> int:
        """Most tokens of a text that fit a row together with the tokens around them."""
        room = self.length - self.length % self.segment_multiple
        return room - (self.eod is not None) + (self.lead is None)

    def segment_length(self, token_count: int, *, is_end: bool) -> int:
        """Positions that a piece of ``token_count`` tokens takes.

        Args:
            token_count: Tokens of the piece.
            is_end: Whether the piece ends a text.
        """
        labels = token_count + (is_end and self.eod is not None) - (self.lead is None)
        return -(-max(labels, 0) // self.segment_multiple) * self.segment_multiple


Parts = tuple[NDArray[Any], ...]


class Segment(NamedTuple):
    """The tokens of a piece on one side; each is predicted at the position before it."""

    ids: Ids
    """[T]"""

    trained: Trained
    """[T]"""

    lead: NDArray[np.int32] | None
    """[1] token read before the first; None: the first token leads and is not predicted."""

    eod: NDArray[np.int32] | None
    """[1] token predicted behind the last; None for none."""

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
        """L, the number of labels."""
        return max(len(self.ids) + (self.eod is not None) - (self.lead is None), 0)

    def inputs(self) -> Parts:
        """Arrays whose concatenation [L] is the inputs."""
        ids = self.ids if self.eod is not None else self.ids[:-1]
        if self.lead is None:
            return (ids,)
        is_empty = self.eod is None and not len(self.ids)
        return () if is_empty else (self.lead, ids)

    def labels(self) -> Parts:
        """Arrays whose concatenation [L] is the labels, ``IGNORE_INDEX`` where untrained."""
        ids = self.ids
        if self.trained is not None:
            ids = np.where(self.trained, ids.astype(np.int64), IGNORE_INDEX)
        return self.at_labels(ids, self.eod)

    def at_labels(self, values: NDArray[Any], at_eod: NDArray[Any] | None) -> Parts:
        """Arrays whose concatenation [L] is the values of the predicted tokens.

        Args:
            values: [T] values of the tokens.
            at_eod: [1] value of the token predicted behind them, if there is one.
        """
        predicted = values if self.lead is not None else values[1:]
        return (predicted,) if self.eod is None or at_eod is None else (predicted, at_eod)

    def reads_first(self, marks: Marks) -> bool:
        """Whether the first token is in a chunk but is not predicted."""
        return self.lead is None and len(marks) > 0 and bool(marks[0])

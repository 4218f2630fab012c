"""A stream of tokens and where each ends in its bytes. T tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.byte_alignment import ByteEnds, Indices, check_byte_ends
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_ids import IdArray

Ids = Sequence[int] | IdArray


class Tokens(NamedTuple):
    """One side of a text."""

    ids: IdArray
    """[T] int32"""

    ends: ByteEnds
    """[T] int64 byte ends, non-decreasing."""

    spells_text: bool = False
    """Known to spell the text that the ends are of, every token what it covers."""

    @classmethod
    def of_stream(cls, ids: Ids, tokenizer: ByteTokenizer, *, side: str) -> Tokens:
        """A given stream, with its ends in the bytes that it decodes to.

        Raises:
            AlignmentError: An id is outside the vocabulary.
        """
        checked = checked_ids(ids, tokenizer.vocab_size, side=side)
        return cls(checked, tokenizer.byte_ends(checked), spells_text=True)

    @classmethod
    def checked(cls, ids: Ids, ends: ByteEnds, vocab_size: int, *, side: str) -> Tokens:
        """Ids and their ends as a caller gives them.

        Raises:
            AlignmentError: They differ in number, an id is outside the vocabulary, or ends go
                backwards.
        """
        tokens = cls(checked_ids(ids, vocab_size, side=side), check_byte_ends(ends, side=side)[0])
        if len(tokens.ids) != len(tokens.ends):
            raise AlignmentError(
                f"{side} ids and byte ends differ in number",
                got=f"{len(tokens.ids)} ids and {len(tokens.ends)} ends",
                fix="pass both as encode_with_byte_ends returns them",
            )
        return tokens

    @property
    def empty(self) -> Indices:
        """Tokens that cover no byte, ascending."""
        empty = np.flatnonzero(self.ends[1:] == self.ends[:-1]) + 1
        return np.append(0, empty) if len(self.ends) and not self.ends[0] else empty

    def head(self, count: int) -> Tokens:
        """The first ``count`` tokens."""
        return Tokens(self.ids[:count], self.ends[:count], self.spells_text)


class AlignedTokens(NamedTuple):
    """Both sides of one text."""

    student: Tokens
    teacher: Tokens
    alignment: Alignment


def checked_ids(ids: Ids, vocab_size: int, *, side: str) -> IdArray:
    """``ids`` as int32 [T], each inside the vocabulary.

    Raises:
        AlignmentError: They are no row of integers, or one is outside.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise AlignmentError(
            f"{side} ids are not a row of integers",
            got=f"shape {array.shape} of {array.dtype}",
            expected="shape [T] of int32",
        )
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise AlignmentError(
            f"{side} id {int(array[at])} at token {at} is outside the vocabulary",
            expected=f"0 to {vocab_size - 1}",
            fix=f"pass ids of the {side}'s own tokenizer, without padding such as -100",
        )
    return array.astype(np.int32, copy=False)

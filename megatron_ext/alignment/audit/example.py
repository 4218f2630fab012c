"""A chunk of a batch as a person reads it: the pieces of both sides, and where it stands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.audit.document import AuditDocument
from megatron_ext.alignment.audit.offenders import Example, Piece

CONTEXT_BYTES: Final = 40
"""Bytes of the text shown on either side."""

MOST_PIECES: Final = 40
"""Pieces shown of a chunk that has more."""

MOST_TEXT: Final = 200
"""Characters shown of a chunk that has more."""


@dataclass(frozen=True, slots=True)
class SpannedTokens:
    """The tokens of one side, and spans of some of them. J spans, T tokens."""

    ids: NDArray[np.int32]
    """[T]"""
    ends: NDArray[np.int64]
    """[T] in bytes of the batch."""
    spans: NDArray[np.int32]
    """[J, 2]"""


class ExampleMaker:
    """Makes examples of chunks in a batch.

    Args:
        batch: Its documents.
        raws: Their UTF-8.
        sides: Tokens of the student and of the teacher, with the spans of the chunks.
    """

    def __init__(
        self,
        batch: Sequence[AuditDocument],
        raws: Sequence[bytes],
        sides: tuple[SpannedTokens, SpannedTokens],
    ) -> None:
        self._batch = batch
        self._raws = raws
        self._begins = [0, *accumulate(map(len, raws))]
        self._sides = sides

    def example(self, chunk: int) -> Example:
        """The ``chunk``-th of the spans."""
        student = self._sides[0]
        first, stop = student.spans[chunk].tolist()
        begin = int(student.ends[first - 1]) if first else 0
        index = bisect_right(self._begins, begin) - 1
        shift = self._begins[index]
        raw, document = self._raws[index], self._batch[index]
        begin, end = begin - shift, int(student.ends[stop - 1]) - shift
        before = raw[max(begin - CONTEXT_BYTES, 0) : begin].decode(errors="ignore")
        after = raw[end : end + CONTEXT_BYTES].decode(errors="ignore")
        sides = [self._pieces(side, chunk, raw, shift) for side in self._sides]
        return Example(
            student=sides[0],
            teacher=sides[1],
            text=shown_bytes(raw[begin:end])[:MOST_TEXT],
            before=before,
            after=after,
            place=document.place(len(raw[:begin].decode(errors="ignore"))),
        )

    @staticmethod
    def _pieces(side: SpannedTokens, chunk: int, raw: bytes, shift: int) -> tuple[Piece, ...]:
        first, stop = side.spans[chunk].tolist()
        stop = min(stop, first + MOST_PIECES)
        start = int(side.ends[first - 1]) if first else 0
        bounds = [start - shift, *(side.ends[first:stop] - shift).tolist()]
        return tuple(
            Piece(token_id, shown_bytes(raw[begin:end]))
            for token_id, (begin, end) in zip(
                side.ids[first:stop].tolist(), pairwise(bounds), strict=True
            )
        )


def shown_bytes(covered: bytes) -> str:
    """Bytes as text; those of a part of a character in angle brackets."""
    try:
        return covered.decode()
    except UnicodeDecodeError:
        return f"<{covered.hex(' ')}>"

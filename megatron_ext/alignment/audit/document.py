"""A text to audit, and how an error or an example names a place in it. J spans, T tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.audit.offenders import Example, Piece

PIECE_CHARACTERS: Final = 1 << 20
"""A document much longer than this is tokenized in pieces of about this size."""

_LINE_START: Final = re.compile(r"\n(?=\S)")


@dataclass(frozen=True, slots=True)
class AuditDocument:
    """One document, or a piece of a long one."""

    text: str
    source: str
    """Name of the file."""
    line: int = 1
    """Line or row of the file where it begins."""
    is_whole_file: bool = False
    """Its own line feeds are lines of the file; those of a record are not."""
    begins_document: bool = True
    """It is no later piece of a document."""

    def place(self, character: int) -> str:
        """``file:line`` of a character."""
        below = self.text.count("\n", 0, character) if self.is_whole_file else 0
        return f"{self.source}:{self.line + below}"

    def pieces(self) -> Iterator[AuditDocument]:
        """The document in pieces that fit in memory many times over.

        A cut is in front of a line that begins with no white space: there hardly any tokenizer has
        a token that reaches over it. Text without such lines stays whole.
        """
        if len(self.text) <= 2 * PIECE_CHARACTERS:
            yield self
            return
        begin, line, begins = 0, self.line, self.begins_document
        while len(self.text) - begin > 2 * PIECE_CHARACTERS:
            cut = _LINE_START.search(self.text, begin + PIECE_CHARACTERS)
            if cut is None:
                break
            yield replace(
                self, text=self.text[begin : cut.end()], line=line, begins_document=begins
            )
            begins = False
            if self.is_whole_file:
                line += self.text.count("\n", begin, cut.end())
            begin = cut.end()
        yield replace(self, text=self.text[begin:], line=line, begins_document=begins)


def document_batches(
    documents: Iterable[AuditDocument], characters: int
) -> Iterator[list[AuditDocument]]:
    """The documents, in pieces, in lists of about so many characters; empty ones are left out."""
    batch: list[AuditDocument] = []
    size = 0
    for document in documents:
        for piece in document.pieces():
            if piece.text:
                batch.append(piece)
                size += len(piece.text)
            if size >= characters:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


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

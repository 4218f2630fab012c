"""A text to audit, and how an error or an example names a place in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

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

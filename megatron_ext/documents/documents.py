"""The ``Documents`` protocol that packing reads, its reports, and concatenation. D documents."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.errors import counted
from megatron_ext.tokenizers.token_ids import IdArray

_PLACES_SHOWN: Final = 10

Report = TypeVar("Report", bound="ReadReport")
Place = TypeVar("Place")


@dataclass(kw_only=True, slots=True)
class ReadReport:
    """Counts that add up over files, with lists of the first few places."""

    def __add__(self: Report, other: Report) -> Report:
        """The sum of the counts, with the places of ``other`` behind these."""
        names = (one.name for one in fields(self))
        return replace(self, **{n: _together(getattr(self, n), getattr(other, n)) for n in names})


@dataclass(kw_only=True, slots=True)
class CorpusReport(ReadReport):
    """Counts of the rows of a corpus, and the places of the first rows left out."""

    rows: int = 0
    """Rows, lines or files that were read."""
    documents: int = 0
    """Rows that hold a text."""
    bytes: int = 0
    """UTF-8 bytes of all documents."""
    empty_rows: int = 0
    """Rows whose text is empty; left out."""
    bad_rows: int = 0
    """Rows that hold no text or cannot be read; left out."""
    places: list[str] = field(default_factory=list)
    """``file:row: reason`` of the first few empty and bad rows."""
    bad: list[list[str]] = field(default_factory=list)
    """``file:row`` and reason of the first few bad rows."""

    def __str__(self) -> str:
        read = f"{counted(self.documents, 'document')} of {counted(self.bytes, 'byte')}"
        lines = [f"{read} in {counted(self.rows, 'row')}"]
        if self.empty_rows or self.bad_rows:
            lines.append(f"{self.empty_rows:,} empty and {self.bad_rows:,} bad rows left out")
        return "\n".join([*lines, *self.places])


def add_place(places: list[Place], place: Place) -> None:
    """Append ``place`` in place, up to the number of places that a report shows."""
    if len(places) < _PLACES_SHOWN:
        places.append(place)


def _together(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict):
        names = {**ours, **theirs}
        return {name: _together(ours.get(name, []), theirs.get(name, [])) for name in names}
    return (ours + theirs)[:_PLACES_SHOWN] if isinstance(ours, list) else ours + theirs


class Documents(Protocol):
    """Documents by number; picklable."""

    def __len__(self) -> int: ...

    def content(self, index: int) -> str | ConversationRecord:
        """One document.

        Raises:
            IndexError: There is no such document.
            DataError: Its file has changed since.
            ConversationError: The document is a conversation that cannot be read.
            TokenizerError: The document is stored as ids that spell no text.
        """

    def place(self, index: int) -> str:
        """``file:row`` of a document."""

    def student_ids(self, index: int) -> IdArray | None:
        """The student's ids of a document that is stored as such; None for text."""

    @property
    def has_student_ids(self) -> bool:
        """Whether any document is stored as ids of the student's tokenizer."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[D] UTF-8 bytes of each document."""

    @property
    def report(self) -> CorpusReport:
        """Counts of the rows read and left out."""

    @property
    def sha256(self) -> str:
        """Hash of the documents in their order, wherever their files are."""


class JoinedDocuments:
    """The concatenation of several ``Documents``.

    Args:
        parts: At least one.
    """

    def __init__(self, parts: Sequence[Documents]) -> None:
        self._parts = tuple(parts)
        self._stops = list(accumulate(map(len, self._parts)))
        self._sizes = np.concatenate([part.sizes for part in self._parts])

    def __len__(self) -> int:
        return self._stops[-1]

    def content(self, index: int) -> str | ConversationRecord:
        """``Documents.content``."""
        documents, number = self._find(index)
        return documents.content(number)

    def place(self, index: int) -> str:
        """``file:row`` of a document."""
        documents, number = self._find(index)
        return documents.place(number)

    def student_ids(self, index: int) -> IdArray | None:
        """``Documents.student_ids``."""
        documents, number = self._find(index)
        return documents.student_ids(number)

    @property
    def has_student_ids(self) -> bool:
        """Whether any document is stored as ids of the student's tokenizer."""
        return any(part.has_student_ids for part in self._parts)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[D] UTF-8 bytes of each document."""
        return self._sizes

    @property
    def report(self) -> CorpusReport:
        """Counts over all parts."""
        return sum((part.report for part in self._parts), CorpusReport())

    @property
    def sha256(self) -> str:
        """Hash of the parts' hashes in order."""
        return hashlib.sha256("".join(part.sha256 for part in self._parts).encode()).hexdigest()

    def _find(self, index: int) -> tuple[Documents, int]:
        """The part that holds document ``index``, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = bisect_right(self._stops, index)
        return self._parts[number], index - (self._stops[number] - len(self._parts[number]))

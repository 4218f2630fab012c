"""What became of the rows of a corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_PLACES_SHOWN: Final = 10


@dataclass(kw_only=True, slots=True)
class CorpusReport:
    """Counts, and where the first rows that give no document are."""

    rows: int = 0
    """Rows, lines or files that were read."""
    documents: int = 0
    """Rows that hold a text."""
    bytes: int = 0
    """UTF-8 bytes of all documents."""
    empty_rows: int = 0
    """Rows whose text is empty."""
    bad_rows: int = 0
    """Rows that hold no text, or cannot be read."""
    places: list[str] = field(default_factory=list)
    """``file:row: reason`` of the first few empty and bad rows."""

    def add_place(self, place: str, reason: str) -> None:
        """Remember where a row gave no document, unless there are enough."""
        if len(self.places) < _PLACES_SHOWN:
            self.places.append(f"{place}: {reason}")

    def add(self, other: CorpusReport) -> None:
        """Add what became of the rows of other files."""
        self.rows += other.rows
        self.documents += other.documents
        self.bytes += other.bytes
        self.empty_rows += other.empty_rows
        self.bad_rows += other.bad_rows
        self.places += other.places[: _PLACES_SHOWN - len(self.places)]

    def __str__(self) -> str:
        lines = [f"{self.documents:,} documents of {self.bytes:,} bytes in {self.rows:,} rows"]
        if self.empty_rows or self.bad_rows:
            lines.append(f"{self.empty_rows:,} empty and {self.bad_rows:,} bad rows left out")
        return "\n".join([*lines, *self.places])

"""Reports of what was read of files, and of what was left out and where."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

_PLACES_SHOWN: Final = 10

Report = TypeVar("Report", bound="ReadReport")


@dataclass(kw_only=True, slots=True)
class ReadReport:
    """Counts, which add up over files, and the first places of each list."""

    def __add__(self: Report, other: Report) -> Report:
        """Both together, the places of ``other`` behind those of this one."""
        names = (one.name for one in fields(self))
        return replace(self, **{n: _together(getattr(self, n), getattr(other, n)) for n in names})


@dataclass(kw_only=True, slots=True)
class CorpusReport(ReadReport):
    """Counts of a corpus, and where the first rows that give no document are."""

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

    def __str__(self) -> str:
        lines = [f"{self.documents:,} documents of {self.bytes:,} bytes in {self.rows:,} rows"]
        if self.empty_rows or self.bad_rows:
            lines.append(f"{self.empty_rows:,} empty and {self.bad_rows:,} bad rows left out")
        return "\n".join([*lines, *self.places])


def add_place(places: list[str], place: str) -> None:
    """Remember where something was lost, unless there are enough."""
    if len(places) < _PLACES_SHOWN:
        places.append(place)


def _together(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict):
        names = {**ours, **theirs}
        return {name: _together(ours.get(name, []), theirs.get(name, [])) for name in names}
    return (ours + theirs)[:_PLACES_SHOWN] if isinstance(ours, list) else ours + theirs

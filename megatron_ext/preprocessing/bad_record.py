"""What could not be used, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import DataError


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line or row that gives no document."""

    line: int | None
    """Counted from 1 in its slice; None where the whole file is meant."""

    problem: str
    """One line of text."""

    rows: int = 1
    """How many lines or rows are lost."""

    @classmethod
    def of(cls, line: int | None, error: Exception, *, rows: int = 1) -> BadRecord:
        """The record that ``error`` is about."""
        return cls(line, str(error).replace("\n", " "), rows)

    def error(self, path: str, lines_before: int = 0) -> DataError:
        """The error that stops a run which takes no bad records."""
        return DataError(self.problem, where=self.place(path, lines_before))

    def place(self, path: str, lines_before: int = 0) -> str:
        """``file:line``.

        Args:
            path: The file.
            lines_before: Its lines before the slice.
        """
        return path if self.line is None else f"{path}:{self.line + lines_before}"

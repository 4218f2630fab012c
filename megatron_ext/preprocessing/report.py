"""Reports of a shard and of a whole run, and the progress bar."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Final

from megatron_ext.documents.record_fields import BadRecord
from megatron_ext.errors import counted
from megatron_ext.imports import needed_packages

MOST_LISTED: Final = 10_000
"""Most bad records that a shard or a run lists; a corpus can have any number."""


@dataclass(slots=True)
class SliceRecord:
    """Counts of one input slice."""

    path: str
    line_count: int = 0
    bad: list[BadRecord] = field(default_factory=list)


@dataclass(slots=True)
class ShardRecord:
    """Counts of one shard, written beside its files when they are complete."""

    plan: str
    """Digest of the plan of the shard."""

    documents: int = 0
    empty_documents: int = 0
    """Documents without tokens, over all keys."""

    untrained_documents: int = 0
    """Documents with tokens of which none is trained, over all keys."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of each dataset; of a loss mask, the trained ones."""

    text_bytes: int = 0
    slices: list[SliceRecord] = field(default_factory=list)
    bad_unlisted: int = 0
    """Bad lines and rows that the slices do not list."""

    def add_bad(self, bad: Sequence[BadRecord]) -> None:
        """Add bad records to the last slice: count all, list them while there is room."""
        listed = sum(len(piece.bad) for piece in self.slices)
        room = max(MOST_LISTED - listed, 0)
        self.slices[-1].bad += bad[:room]
        self.bad_unlisted += sum(row.rows for row in bad[room:])

    def to_values(self) -> dict[str, Any]:
        """Plain values for JSON, the inverse of ``from_values``."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ShardRecord:
        """The inverse of ``to_values``."""
        slices = [
            SliceRecord(piece["path"], piece["line_count"], [BadRecord(**b) for b in piece["bad"]])
            for piece in values["slices"]
        ]
        return cls(**{**values, "slices": slices})

    @property
    def bad_count(self) -> int:
        """Number of bad lines and rows."""
        listed = sum(bad.rows for piece in self.slices for bad in piece.bad)
        return listed + self.bad_unlisted


@dataclass(frozen=True, slots=True)
class BadPlace:
    """A bad record of the input, for the report."""

    place: str
    """``file:line``"""

    problem: str
    rows: int
    """Lines or rows lost."""


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a whole run, independent of its shards and interruptions."""

    settings: Mapping[str, Any]
    inputs: Sequence[str]
    skipped_files: Sequence[str]
    """Files of unknown kind in the input folders."""

    documents: int
    empty_documents: int
    untrained_documents: int
    tokens: Mapping[str, int]
    """Tokens of each dataset; of a loss mask, the trained ones."""

    text_bytes: int
    bad_records: int
    bad: Sequence[BadPlace] = field(default=())
    """The first bad records of the input."""

    bad_unlisted: int = 0
    """Lines and rows of ``bad_records`` that are not listed in ``bad``."""

    @classmethod
    def of(
        cls,
        records: Iterable[ShardRecord],
        *,
        settings: Mapping[str, Any],
        inputs: Sequence[str],
        skipped_files: Sequence[str],
    ) -> Report:
        """The sum of all shards, given in order."""
        totals: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        lines: Counter[str] = Counter()
        bad: list[BadPlace] = []
        for record in records:
            totals["documents"] += record.documents
            totals["empty_documents"] += record.empty_documents
            totals["untrained_documents"] += record.untrained_documents
            totals["text_bytes"] += record.text_bytes
            totals["bad_records"] += record.bad_count
            tokens.update(record.tokens)
            for piece in record.slices:
                bad += [
                    BadPlace(row.place(piece.path, lines[piece.path]), row.problem, row.rows)
                    for row in piece.bad[: MOST_LISTED - len(bad)]
                ]
                lines[piece.path] += piece.line_count
        unlisted = totals["bad_records"] - sum(row.rows for row in bad)
        return cls(
            settings,
            inputs,
            skipped_files,
            tokens=dict(tokens),
            bad=bad,
            bad_unlisted=unlisted,
            **totals,
        )

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


_FORMAT = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left]{postfix}"
_SECONDS_BETWEEN_LOG_LINES = 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done since the last progress message."""

    size: int
    """Bytes of input read."""

    text_bytes: int
    documents: int
    bad: int


class ProgressBar:
    """Progress bar over the bytes of the input, with the speed in bytes of text.

    It is drawn in place on a terminal; in a log it writes a line every half minute.

    Args:
        total: Bytes of input.
        done: Bytes read before the run was resumed.
    """

    def __init__(self, *, total: int, done: int) -> None:
        with needed_packages("the progress bar"):
            from tqdm import tqdm
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="B",
            unit_scale=True,
            bar_format=_FORMAT,
            mininterval=0.2 if sys.stderr.isatty() else _SECONDS_BETWEEN_LOG_LINES,
        )
        self._start = time.monotonic()
        self._text_bytes = 0
        self._documents = 0
        self._bad = 0

    def add(self, progress: Progress) -> None:
        """Add progress."""
        self._text_bytes += progress.text_bytes
        self._documents += progress.documents
        self._bad += progress.bad
        self._bar.set_postfix_str(self._summary(), refresh=False)
        self._bar.update(progress.size)

    def _summary(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        bad = f", {self._bad:,} bad" if self._bad else ""
        speed = self._text_bytes / seconds / 1e6
        return f"{speed:.1f} MB/s of text, {counted(self._documents, 'document')}{bad}"

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

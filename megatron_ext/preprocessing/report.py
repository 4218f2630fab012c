"""Reports of one shard and of a whole run: what was read, written and left out.

The progress of a run, its speed and the time that is left.
"""

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
from megatron_ext.extras import needed_packages

MOST_LISTED: Final = 10_000
"""Bad records that are listed, of a shard and of a run; a corpus can have any number of them."""


@dataclass(slots=True)
class SliceRecord:
    """What was read of one slice."""

    path: str
    line_count: int = 0
    bad: list[BadRecord] = field(default_factory=list)


@dataclass(slots=True)
class ShardRecord:
    """Counts of one shard, written beside its parts when these are whole."""

    plan: str
    """Digest of the plan that the shard belongs to."""

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
    """Lines and rows that gave no document beyond those that the slices list."""

    def add_bad(self, bad: Sequence[BadRecord]) -> None:
        """Count what the last slice has lost, and list it while there is room."""
        listed = sum(len(piece.bad) for piece in self.slices)
        room = max(MOST_LISTED - listed, 0)
        self.slices[-1].bad += bad[:room]
        self.bad_unlisted += sum(row.rows for row in bad[room:])

    def to_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ShardRecord:
        """What ``to_values`` gave."""
        slices = [
            SliceRecord(piece["path"], piece["line_count"], [BadRecord(**b) for b in piece["bad"]])
            for piece in values["slices"]
        ]
        return cls(**{**values, "slices": slices})

    @property
    def bad_count(self) -> int:
        """Lines and rows that gave no document."""
        listed = sum(bad.rows for piece in self.slices for bad in piece.bad)
        return listed + self.bad_unlisted


@dataclass(frozen=True, slots=True)
class BadPlace:
    """Something that gave no document."""

    place: str
    """``file:line``"""

    problem: str
    rows: int
    """Lines or rows that are lost."""


@dataclass(frozen=True, slots=True)
class Report:
    """The run as a whole; the same however it was cut into shards and often it was killed."""

    settings: Mapping[str, Any]
    inputs: Sequence[str]
    skipped_files: Sequence[str]
    """Files of the named folders that are of no known kind."""

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
    """Lines and rows among ``bad_records`` that are not in ``bad``."""

    @classmethod
    def of(
        cls,
        records: Iterable[ShardRecord],
        *,
        settings: Mapping[str, Any],
        inputs: Sequence[str],
        skipped_files: Sequence[str],
    ) -> Report:
        """The sum of all shards, which come in order."""
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
        """The report as a file."""
        return json.dumps(asdict(self), indent=1) + "\n"


_FORMAT = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left]{postfix}"
_SECONDS_BETWEEN_LOG_LINES = 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened since the last one."""

    size: int
    """Bytes of input read."""

    text_bytes: int
    documents: int
    bad: int


class ProgressBar:
    """A bar over the bytes of the input, with the speed in bytes of text.

    On a terminal it is drawn in place; into a log it writes a line every half minute.

    Args:
        total: Bytes of input.
        done: Those that an earlier run has read.
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
        """Count what was done."""
        self._text_bytes += progress.text_bytes
        self._documents += progress.documents
        self._bad += progress.bad
        self._bar.set_postfix_str(self._summary(), refresh=False)
        self._bar.update(progress.size)

    def _summary(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        bad = f", {self._bad:,} bad" if self._bad else ""
        speed = self._text_bytes / seconds / 1e6
        return f"{speed:.1f} MB/s of text, {self._documents:,} documents{bad}"

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

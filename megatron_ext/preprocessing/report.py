"""Reports of one shard and of a whole run: what was read, written and left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from megatron_ext.documents.record_fields import BadRecord

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

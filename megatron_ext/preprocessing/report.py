"""What a run read, wrote and left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_ext.preprocessing.shard_record import MOST_LISTED, ShardRecord


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

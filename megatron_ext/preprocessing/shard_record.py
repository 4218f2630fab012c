"""What one shard did: counts, and what it could not use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from megatron_ext.preprocessing.bad_record import BadRecord

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

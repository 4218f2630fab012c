"""Collectives over a vocabulary that is sharded across a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Columns ``[start, stop)`` of a vocabulary, as this rank holds them.

    The group's ranks hold equally many columns each, in rank order (megatron-core's layout). Columns
    at or beyond ``vocab_size`` are padding and take no probability mass.
    """

    start: int
    stop: int
    vocab_size: int
    """Number of real tokens, over all shards."""

    group: ProcessGroup | None = None
    """None: one rank holds every column."""

    @property
    def width(self) -> int:
        """Vp, padding included."""
        return self.stop - self.start

    @property
    def valid_width(self) -> int:
        """Columns of this shard that are real tokens."""
        return min(max(self.vocab_size - self.start, 0), self.width)

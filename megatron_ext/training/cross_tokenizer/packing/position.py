"""How far a stream of samples was read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """The next sample."""

    epoch: int = 0

    block: int = 0
    """Among the blocks of this rank in the epoch."""

    sample: int = 0
    """In the block."""

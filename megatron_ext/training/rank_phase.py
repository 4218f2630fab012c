"""The current phase of this process, for reports of where a rank hangs."""

from __future__ import annotations

from typing import NamedTuple


class RankPhase(NamedTuple):
    """A stretch of work."""

    name: str
    iteration: int
    """Current iteration; 0 before the first."""

    number: int
    """Number of phases entered before this one."""


_current = RankPhase("starting", 0, 0)


def enter(name: str, *, iteration: int | None = None) -> None:
    """Begin a phase, of the previous phase's iteration where none is given."""
    global _current
    before = _current
    _current = RankPhase(
        name, before.iteration if iteration is None else iteration, before.number + 1
    )


def tick() -> None:
    """Note progress within a phase, where a loop may stay at one line for long."""
    enter(_current.name)


def current() -> RankPhase:
    """The phase that was entered last."""
    return _current

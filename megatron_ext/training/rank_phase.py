"""What this process is doing, for whoever has to say where it hangs; one for the process."""

from __future__ import annotations

from typing import NamedTuple


class RankPhase(NamedTuple):
    """A stretch of work."""

    name: str
    iteration: int
    """The one that is worked on; 0 before the first."""

    number: int
    """Phases entered before this one."""


_current = RankPhase("starting", 0, 0)


def enter(name: str, *, iteration: int | None = None) -> None:
    """Begin a phase, of the iteration before where none is given."""
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

"""What the time of a run went into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron_ext.cli.alignment.ribbon import bar_of
from megatron_ext.cli.reporting.quantity import duration, share
from megatron_ext.cli.reporting.run_record import RunRecord

PREFIX: Final = "seconds/"
_WITHIN_DATA: Final = "waiting"
"""A part of the phase ``data``, and no phase of its own."""
_WITHIN_TEACHER: Final = "teacher_waiting"
"""A part of ``teacher``, likewise."""
_BETWEEN_STEPS: Final = frozenset({"evaluation", "checkpoint"})
"""Phases that are not in the ``seconds`` of a step."""


@dataclass(frozen=True, slots=True)
class Share:
    """One phase."""

    name: str
    seconds: str
    share: str
    begin: float
    """Where it begins in a bar of 100."""
    width: float


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The phases of a run."""

    run: str
    shares: tuple[Share, ...]
    """Empty where none were measured."""
    waited: str
    """The part of ``data`` in which no sample was at hand; empty where it was not measured."""


def time_shares(runs: Sequence[RunRecord]) -> list[TimeShares]:
    """Of each run."""
    return [_of(run) for run in runs]


def phase_names(shares: Sequence[TimeShares]) -> list[str]:
    """All phases, in the order of their coming."""
    return list(dict.fromkeys(one.name for of_run in shares for one in of_run.shares))


def _of(run: RunRecord) -> TimeShares:
    phases = {
        name.removeprefix(PREFIX): sum(run.values(name))
        for name in run.names()
        if name.startswith(PREFIX) and run.values(name)
    }
    waited = phases.pop(_WITHIN_DATA, None)
    phases.pop(_WITHIN_TEACHER, None)
    if not phases:
        return TimeShares(run.name, (), "")
    inside = sum(seconds for name, seconds in phases.items() if name not in _BETWEEN_STEPS)
    phases["other"] = max(sum(run.values("seconds")) - inside, 0.0)
    whole = sum(phases.values())
    # A bar is cut in whole numbers: a millionth of the time each.
    bars = bar_of([round(1e6 * seconds / whole) if whole else 0 for seconds in phases.values()])
    return TimeShares(
        run.name,
        tuple(
            Share(name, duration(seconds), share(seconds, whole), *bar)
            for (name, seconds), bar in zip(phases.items(), bars, strict=True)
        ),
        "" if waited is None else f"{duration(waited)}, {share(waited, whole)}",
    )

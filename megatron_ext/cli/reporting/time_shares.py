"""What the time of a run went into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from megatron_ext.cli.pages.markup import BarPart, TableRow, bar, swatch
from megatron_ext.cli.reporting.panel import COLOURS
from megatron_ext.cli.reporting.quantity import duration, share
from megatron_ext.cli.reporting.run_record import RunRecord

PREFIX: Final = "seconds/"
_WAITING: Final = "seconds/waiting"
_WITHIN_OTHERS: Final = frozenset({_WAITING, "seconds/teacher_waiting"})
"""Parts of the phases ``data`` and ``teacher``, and no phases of their own."""
_BETWEEN_STEPS: Final = frozenset({"evaluation", "checkpoint"})
"""Phases that are not in the ``seconds`` of a step."""


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The phases of a run."""

    run: str
    rows: tuple[TableRow, ...]
    """Time and share of each; empty where none were measured."""
    bar: Markup
    waited: str
    """The part of ``data`` in which no sample was at hand; empty where it was not measured."""


def time_shares(runs: Sequence[RunRecord]) -> list[TimeShares]:
    """Of each run; a phase has the same colour in all."""
    phases = [_phases(run) for run in runs]
    names = dict.fromkeys(name for of_run in phases for name in of_run)
    styles = {name: f"c{number % COLOURS}" for number, name in enumerate(names)}
    return [_of(run, of_run, styles) for run, of_run in zip(runs, phases, strict=True)]


def _phases(run: RunRecord) -> dict[str, float]:
    """Seconds of each phase, what lies between phases last; empty where none were measured."""
    phases = {
        name.removeprefix(PREFIX): sum(run.values(name))
        for name in run.names()
        if name.startswith(PREFIX) and name not in _WITHIN_OTHERS and run.values(name)
    }
    if phases:
        inside = sum(seconds for name, seconds in phases.items() if name not in _BETWEEN_STEPS)
        phases["other"] = max(sum(run.values("seconds")) - inside, 0.0)
    return phases


def _of(run: RunRecord, phases: Mapping[str, float], styles: Mapping[str, str]) -> TimeShares:
    whole = sum(phases.values())
    rows, parts = [], []
    for name, seconds in phases.items():
        cells = duration(seconds), share(seconds, whole)
        rows.append(TableRow(swatch(styles[name], name), cells))
        parts.append(BarPart(styles[name], seconds, f"{name} {cells[1]}"))
    waits = run.values(_WAITING)
    waited = f"{duration(sum(waits))}, {share(sum(waits), whole)}" if waits else ""
    return TimeShares(run.name, tuple(rows), bar(parts, "shares of time"), waited)

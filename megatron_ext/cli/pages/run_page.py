"""Runs as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from megatron_ext.cli.pages import run_tables
from megatron_ext.cli.pages.audit_page import coverage_table
from megatron_ext.cli.pages.frame import html_page
from megatron_ext.cli.pages.markup import BarPart, TableRow, bar, swatch
from megatron_ext.cli.pages.readable import duration, share
from megatron_ext.cli.pages.run_charts import SMOOTHING
from megatron_ext.cli.pages.run_panels import COLOURS, other_panels, panels
from megatron_ext.cli.pages.run_record import RunRecord
from megatron_ext.cli.pages.run_samples import PairSample
from megatron_ext.version import __version__

_PREFIX: Final = "seconds/"
_WAITING: Final = "seconds/waiting"
_WITHIN_OTHERS: Final = frozenset({_WAITING, "seconds/teacher_waiting"})
"""Parts of the phases ``data`` and ``teacher``, and no phases of their own."""
_BETWEEN_STEPS: Final = frozenset({"evaluation", "checkpoint"})
"""Phases that are not in the ``seconds`` of a step."""


def report_page(runs: Sequence[RunRecord], samples: Sequence[PairSample]) -> str:
    """The page of one run, or of several beside one another."""
    others = other_panels(runs)
    names = [run.name for run in runs]
    values = {
        "runs": runs,
        "names": names,
        "several": len(runs) > 1,
        "state": run_tables.state,
        "totals": run_tables.totals(runs),
        "panels": panels(runs),
        "others": [panel for panel in others if panel.title != _PREFIX.rstrip("/")],
        "phase_panels": [panel for panel in others if panel.title == _PREFIX.rstrip("/")],
        "shares": _time_shares(runs),
        "held_out": [(run.name, *run_tables.held_out(run)) for run in runs],
        "evaluations": run_tables.evaluations(runs),
        "chunks": run_tables.chunks(runs),
        "data": run_tables.data(runs),
        "configuration": run_tables.configuration(runs),
        "samples": samples,
        "coverage": coverage_table,
        "colours": COLOURS,
        "smoothing": SMOOTHING,
        "version": __version__,
    }
    return html_page("report", values, title=" · ".join(names), styles=("alignment",))


@dataclass(frozen=True, slots=True)
class _TimeShares:
    """The phases of a run."""

    run: str
    rows: tuple[TableRow, ...]
    """Time and share of each; empty where none were measured."""
    bar: Markup
    waited: str
    """The part of ``data`` in which no sample was at hand; empty where it was not measured."""


def _time_shares(runs: Sequence[RunRecord]) -> list[_TimeShares]:
    """Of each run; a phase has the same colour in all."""
    phases = [_phases(run) for run in runs]
    names = dict.fromkeys(name for of_run in phases for name in of_run)
    styles = {name: f"c{number % COLOURS}" for number, name in enumerate(names)}
    return [_shares_of(run, of_run, styles) for run, of_run in zip(runs, phases, strict=True)]


def _phases(run: RunRecord) -> dict[str, float]:
    """Seconds of each phase, what lies between phases last; empty where none were measured."""
    phases = {
        name.removeprefix(_PREFIX): sum(run.values(name))
        for name in run.names()
        if name.startswith(_PREFIX) and name not in _WITHIN_OTHERS and run.values(name)
    }
    if phases:
        inside = sum(seconds for name, seconds in phases.items() if name not in _BETWEEN_STEPS)
        phases["other"] = max(sum(run.values("seconds")) - inside, 0.0)
    return phases


def _shares_of(
    run: RunRecord, phases: Mapping[str, float], styles: Mapping[str, str]
) -> _TimeShares:
    whole = sum(phases.values())
    rows, parts = [], []
    for name, seconds in phases.items():
        cells = duration(seconds), share(seconds, whole)
        rows.append(TableRow(swatch(styles[name], name), cells))
        parts.append(BarPart(styles[name], seconds, f"{name} {cells[1]}"))
    waits = run.values(_WAITING)
    waited = f"{duration(sum(waits))}, {share(sum(waits), whole)}" if waits else ""
    return _TimeShares(run.name, tuple(rows), bar(parts, "shares of time"), waited)

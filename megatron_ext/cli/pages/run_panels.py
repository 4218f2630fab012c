"""Measurements that are drawn together: a row of ``_KINDS`` each, and a panel for what is left."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron_ext.cli.pages.readable import number
from megatron_ext.cli.pages.run_charts import Chart, Curve
from megatron_ext.cli.pages.run_record import RunRecord

COLOURS: Final = 8
"""Lines that differ by colour; more differ by dashes as well."""
_MOST_POINTS: Final = 400
_MOST_POINTS_SMALL: Final = 150


@dataclass(frozen=True, slots=True)
class Panel:
    """Charts under one heading."""

    title: str
    about: str
    charts: tuple[Chart, ...]
    unchanged: tuple[tuple[str, str], ...] = ()
    """Names of what was the same in all iterations of all runs, and its value."""
    is_small: bool = False
    is_first: bool = False

    @property
    def is_wide(self) -> bool:
        """It has the width of the page."""
        return self.is_first or len(self.charts) > 1


class _Kind(NamedTuple):
    title: str
    about: str
    takes: Callable[[str, frozenset[str]], bool]
    """Whether it shows a measurement of this name; also given the names of terms of teachers."""
    is_smoothed: bool = True
    is_together: bool = False
    """With one run all its measurements are in one chart: they have one unit."""
    unit: float = 1.0
    """What values are divided by."""


_KINDS: Final = (
    _Kind(
        "Loss",
        "The loss of a step and its terms before they are weighted: ce is next-token "
        "cross-entropy, kd what the student learns by from its teachers, with a term for each "
        "of several.",
        lambda name, terms: name in {"loss", "ce", "kd"} or name in terms,
        is_together=True,
    ),
    _Kind(
        "Held-out bits per byte",
        "Of text that is not trained on; lower is better, whatever the tokenizers are.",
        lambda name, _: re.match(r"(student|teacher)_bits_per_byte(/|$)", name) is not None,
        is_smoothed=False,
        is_together=True,
    ),
    _Kind(
        "Agreement",
        "Held-out chunks of one token each in which student and teacher choose the same token.",
        lambda name, _: re.match(r"agreement(/|$)", name) is not None,
        is_smoothed=False,
        is_together=True,
    ),
    _Kind(
        "Tasks",
        "Measured between steps.",
        lambda name, _: name.startswith("eval/"),
        is_smoothed=False,
    ),
    _Kind("Learning rate", "", lambda name, _: name == "learning_rate", is_smoothed=False),
    _Kind("Gradient norm", "Before clipping.", lambda name, _: name == "grad_norm"),
    _Kind(
        "Weights of the terms",
        "Those of the loss, where they change.",
        lambda name, _: name.endswith("_weight"),
        is_smoothed=False,
        is_together=True,
    ),
    _Kind("Tokens per second", "Over all replicas.", lambda name, _: name == "tokens_per_second"),
    _Kind(
        "Memory",
        "Peak of one process, in GiB.",
        lambda name, _: name == "memory_bytes",
        is_smoothed=False,
        unit=2**30,
    ),
    _Kind("Seconds of a step", "", lambda name, _: name == "seconds"),
)


def panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """The panels of the main measurements, those that have something to show."""
    names = _names(runs)
    terms = _terms(runs)
    found: list[Panel] = []
    for kind in _KINDS:
        taken = [name for name in names if kind.takes(name, terms)]
        if taken:
            found.append(_main(runs, kind, taken, is_first=not found))
    return found


def other_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """Everything else that was measured, a panel for each prefix of names."""
    terms = _terms(runs)
    by_prefix: dict[str, list[str]] = {}
    for name in _names(runs):
        if not any(kind.takes(name, terms) for kind in _KINDS):
            by_prefix.setdefault(name.rpartition("/")[0], []).append(name)
    return [_small(runs, prefix, names) for prefix, names in by_prefix.items()]


def _main(runs: Sequence[RunRecord], kind: _Kind, names: Sequence[str], *, is_first: bool) -> Panel:
    """One chart of one run; of several a chart for each name that changes, where any does."""
    groups, unchanged = [list(names)], []
    if len(runs) > 1 or not kind.is_together:
        constant = [] if len(names) == 1 else [n for n in names if len(_values(runs, n)) == 1]
        groups = [[name] for name in names if name not in constant]
        unchanged = [(name, number(_values(runs, name).pop())) for name in constant]
    charts = (_chart(runs, group, kind.title, kind) for group in groups)
    return Panel(kind.title, kind.about, tuple(charts), tuple(unchanged), is_first=is_first)


def _small(runs: Sequence[RunRecord], prefix: str, names: Sequence[str]) -> Panel:
    charts, unchanged = [], []
    for name in names:
        values = _values(runs, name)
        if len(values) == 1:
            unchanged.append((name, number(values.pop())))
        else:
            charts.append(_chart(runs, [name], name, most=_MOST_POINTS_SMALL))
    return Panel(prefix or "counts", "", tuple(charts), tuple(unchanged), is_small=True)


def _chart(
    runs: Sequence[RunRecord],
    names: Sequence[str],
    title: str,
    kind: _Kind | None = None,
    *,
    most: int = _MOST_POINTS,
) -> Chart:
    """A curve for each name of the one run, or for each run that has the one name."""
    is_one = len(runs) == 1
    unit = kind.unit if kind else 1.0
    curves = []
    for run_number, run in enumerate(runs):
        for name_number, name in enumerate(names):
            points = [(iteration, value / unit) for iteration, value in run.points(name)]
            if points:
                label, colour = (name, name_number) if is_one else (run.name, run_number)
                curves.append(Curve.of(label, points, most=most, number=colour))
    is_smoothed = kind is None or kind.is_smoothed
    return Chart(title if is_one else names[0], curves, is_smoothed=is_smoothed)


def _values(runs: Sequence[RunRecord], name: str) -> set[float]:
    return {value for run in runs for value in run.values(name)}


def _names(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.names() if run.values(name)))


def _terms(runs: Sequence[RunRecord]) -> frozenset[str]:
    return frozenset(f"kd/{name}" for run in runs for name in run.teachers)

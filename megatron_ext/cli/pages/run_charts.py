"""Panels of charts: what is drawn of the measurements of runs, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron_ext.cli.pages.chart import Chart, Curve
from megatron_ext.cli.pages.run_record import RunRecord
from megatron_ext.cli.pages.token_view import number

COLOURS: Final = 8
"""Number of colours; further lines differ by dashes."""
_MOST_POINTS: Final = 400
_MOST_POINTS_SMALL: Final = 150


@dataclass(frozen=True, slots=True)
class Panel:
    """Charts under one heading."""

    title: str
    about: str
    charts: tuple[Chart, ...]
    unchanged: tuple[tuple[str, str], ...] = ()
    """Names and values of measurements that are constant over all iterations and runs."""
    is_small: bool = False
    is_first: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether it has the width of the page."""
        return self.is_first or len(self.charts) > 1


class _Kind(NamedTuple):
    title: str
    about: str
    takes: Callable[[str, frozenset[str]], bool]
    """Whether a measurement belongs to it, by its name and the names of all teachers' terms."""
    is_smoothed: bool = True
    is_together: bool = False
    """Whether one run's measurements share a chart, since they have one unit."""
    unit: str = ""
    """Name of the unit, beside the axis."""
    divisor: float = 1.0
    """Size of the unit."""


_KINDS: Final = (
    _Kind(
        "Loss",
        "The loss of a step and its terms before they are weighted: ce is next-token "
        "cross-entropy, kd the distillation term, with one more for each of several teachers.",
        lambda name, terms: name in {"loss", "ce", "kd"} or name in terms,
        is_together=True,
        unit="nats",
    ),
    _Kind(
        "Held-out bits per byte",
        "Of text that is not trained on; lower is better, whatever the tokenizers are.",
        lambda name, _: re.match(r"(student|teacher)_bits_per_byte(/|$)", name) is not None,
        is_smoothed=False,
        is_together=True,
        unit="bits per byte",
    ),
    _Kind(
        "Agreement",
        "Held-out chunks of one token each in which student and teacher choose the same token.",
        lambda name, _: re.match(r"agreement(/|$)", name) is not None,
        is_smoothed=False,
        is_together=True,
        unit="share of chunks",
    ),
    _Kind(
        "Accuracy",
        "Held-out tokens that the student predicts first.",
        lambda name, _: name == "student_accuracy",
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
        unit="GiB",
        divisor=2**30,
    ),
    _Kind("Seconds of a step", "", lambda name, _: name == "seconds", unit="s"),
)


def panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """The panels of the main measurements that have values."""
    names = _names(runs)
    terms = _terms(runs)
    panels: list[Panel] = []
    for kind in _KINDS:
        taken = [name for name in names if kind.takes(name, terms)]
        if taken:
            panels.append(_main(runs, kind, taken, is_first=not panels))
    return panels


def other_panels(runs: Sequence[RunRecord]) -> list[Panel]:
    """The panels of all other measurements, one for each prefix of names."""
    terms = _terms(runs)
    by_prefix: dict[str, list[str]] = {}
    for name in _names(runs):
        if not any(kind.takes(name, terms) for kind in _KINDS):
            by_prefix.setdefault(name.rpartition("/")[0], []).append(name)
    return [_small(runs, prefix, names) for prefix, names in by_prefix.items()]


def _main(runs: Sequence[RunRecord], kind: _Kind, names: Sequence[str], *, is_first: bool) -> Panel:
    """A panel of one chart for one run, or of a chart for each varying name of several runs."""
    groups, unchanged = [list(names)], []
    if len(runs) > 1 or not kind.is_together:
        constant = [] if len(names) == 1 else [n for n in names if len(_values(runs, n)) == 1]
        groups = [[name] for name in names if name not in constant]
        unchanged = [(_shown(name), number(_values(runs, name).pop())) for name in constant]
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
    """A chart of one run with a curve a name, or of one name with a curve a run."""
    is_one = len(runs) == 1
    divisor = kind.divisor if kind else 1.0
    unit = kind.unit if kind else "s" if title.startswith("seconds") else ""
    curves = []
    for run_number, run in enumerate(runs):
        for name_number, name in enumerate(names):
            points = [(iteration, value / divisor) for iteration, value in run.points(name)]
            if points:
                label, colour = (_shown(name), name_number) if is_one else (run.name, run_number)
                curves.append(Curve.of(label, points, most=most, number=colour, run=run_number))
    is_smoothed = kind is None or kind.is_smoothed
    return Chart(title if is_one else _shown(names[0]), curves, is_smoothed=is_smoothed, unit=unit)


def _shown(name: str) -> str:
    """The name of a measurement under the heading of its panel, which says what is measured."""
    whose = re.sub("_bits_per_byte|_accuracy$", "", name)
    return name if whose == name else whose.replace("/", " ")


def clocks(runs: Sequence[RunRecord]) -> list[list[list[float]]]:
    """Iterations, tokens and seconds so far of each run, for the other axes of the charts."""
    return [_clock(run) for run in runs]


def _clock(run: RunRecord) -> list[list[float]]:
    tokens, seconds = dict(run.points("tokens")), dict(run.points("seconds"))
    trained = spent = 0.0
    so_far = []
    for row in run.rows:
        iteration = row["iteration"]
        trained += tokens.get(iteration, 0.0)
        spent += seconds.get(iteration, 0.0)
        so_far.append((iteration, trained, spent))
    size = max(-(-len(so_far) // _MOST_POINTS), 1)
    kept = [*so_far[: len(so_far) - 1 : size], *so_far[-1:]]
    return [[float(f"{value:.6g}") for value in column] for column in zip(*kept, strict=True)]


def _values(runs: Sequence[RunRecord], name: str) -> set[float]:
    return {value for run in runs for value in run.values(name)}


def _names(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.names() if run.values(name)))


def _terms(runs: Sequence[RunRecord]) -> frozenset[str]:
    return frozenset(f"kd/{name}" for run in runs for name in run.teachers)

"""Charts of measurements: panels, and curves reduced, smoothed and scaled to SVG paths."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from megatron_ext.cli.pages.run_record import RunRecord
from megatron_ext.cli.pages.token_view import number, short_number

SMOOTHING: Final = 0.8
"""Weight of the past in exponential smoothing."""
_LEAST_TO_SMOOTH: Final = 10

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line."""

    label: str
    points: Points
    """Iteration and value in order, at least one."""
    number: int = 0
    """Number of its colour."""
    is_sparse: bool = False
    """Whether each point is a separate measurement, which is marked."""

    @classmethod
    def of(cls, label: str, points: Points, *, most: int, number: int) -> Curve:
        """A curve through the points, averaged to at most ``most``."""
        drawn = list(means(points, most=most))
        return cls(label, drawn, number, is_sparse=len(drawn) < _LEAST_TO_SMOOTH)


def means(points: Points, *, most: int) -> Iterator[tuple[float, float]]:
    """At most ``most`` points: means of equally many neighbours each, fewer in the last."""
    size = -(-len(points) // most)
    for begin in range(0, len(points), max(size, 1)):
        part = points[begin : begin + size]
        yield (
            sum(iteration for iteration, _ in part) / len(part),
            sum(value / len(part) for _, value in part),
        )


def smoothed(points: Points, weight: float = SMOOTHING) -> list[tuple[float, float]]:
    """Exponential moving average with bias correction: sums are divided by the sums of weights."""
    total = whole = 0.0
    averages = []
    for iteration, value in points:
        total = weight * total + (1 - weight) * value
        whole = weight * whole + (1 - weight)
        averages.append((iteration, total / whole))
    return averages


SIDE: Final = 1000
_TICKS: Final = 5
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled position on an axis, in per cent of its length from the left or top."""

    percent: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A curve as the data of SVG paths."""

    label: str
    number: int
    last: str
    """Last value in words, smoothed if the curve is."""
    raw: str
    smooth: str
    """Path of the smoothed curve; empty if it is not smoothed."""
    dots: str


class Chart:
    """Curves with common axes.

    Args:
        title: Name of the measurement.
        curves: At least one.
        is_smoothed: Also draw smoothed lines, if there are enough points.
    """

    def __init__(self, title: str, curves: Sequence[Curve], *, is_smoothed: bool = True) -> None:
        self.title = title
        self._curves = curves
        self._is_smoothed = is_smoothed
        every = [point for curve in curves for point in curve.points]
        self._x = _Axis([x for x, _ in every], is_padded=False)
        self._y = _Axis([y for _, y in every], is_padded=True)

    @property
    def lines(self) -> Iterator[Line]:
        """The curves as paths."""
        for curve in self._curves:
            smooth: Points = []
            if self._is_smoothed and not curve.is_sparse:
                smooth = smoothed(curve.points)
            yield Line(
                curve.label,
                curve.number,
                number((smooth or curve.points)[-1][1]),
                self._path(curve.points),
                self._path(smooth),
                "".join(f"M{x} {y}h0" for x, y in self._places(curve.points))
                if curve.is_sparse
                else "",
            )

    @property
    def x_ticks(self) -> list[Tick]:
        """Iterations from left to right."""
        return [
            Tick(100 * self._x.share(value), short_number(value))
            for value in self._x.ticks()
            if float(value).is_integer()
        ]

    @property
    def y_ticks(self) -> list[Tick]:
        """Values from bottom to top."""
        return [
            Tick(100 - 100 * self._y.share(value), short_number(value)) for value in self._y.ticks()
        ]

    @property
    def grid(self) -> str:
        """Path of the horizontal lines at the ticks."""
        return "".join(f"M0 {tick.percent * SIDE / 100:.0f}h{SIDE}" for tick in self.y_ticks)

    def _places(self, points: Points) -> list[tuple[int, int]]:
        return [
            (round(SIDE * self._x.share(x)), round(SIDE * (1 - self._y.share(y))))
            for x, y in points
        ]

    def _path(self, points: Points) -> str:
        places = [f"{x} {y}" for x, y in self._places(points)]
        # A line of one point is drawn as a dot.
        return f"M{'L'.join(places)}{'h0' if len(places) == 1 else ''}" if places else ""


class _Axis:
    def __init__(self, values: Sequence[float], *, is_padded: bool) -> None:
        low, high = min(values), max(values)
        if high - low <= 1e-12 * max(abs(low), abs(high)):
            margin = abs(high) / 2 or 1.0
        else:
            margin = (high / 2 - low / 2) / 10 if is_padded else 0.0
        self._low, self._high = low - margin, high + margin

    def share(self, value: float) -> float:
        """Position of a value, 0 to 1; computed from halves so that no difference overflows."""
        return (value / 2 - self._low / 2) / (self._high / 2 - self._low / 2)

    def ticks(self) -> list[float]:
        """About ``_TICKS`` round values."""
        rough = (self._high / 2 - self._low / 2) / _TICKS * 2
        # No labels where the range is too small or too large for steps in floats.
        if not math.isfinite(rough) or rough <= 0 or math.log10(rough) < -300:
            return []
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next((unit * s for s in _STEPS if unit * s >= rough), unit * 10)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [
            round(i * step, 12) if abs(step) > 1e-9 else i * step for i in range(first, last + 1)
        ]


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
    unit: float = 1.0
    """Divisor of the values."""


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
        unit=2**30,
    ),
    _Kind("Seconds of a step", "", lambda name, _: name == "seconds"),
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
    """A chart of one run with a curve a name, or of one name with a curve a run."""
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

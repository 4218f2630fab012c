"""A chart: curves reduced, smoothed and scaled to SVG paths, and the data that a script redraws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_ext.cli.pages.token_view import number, short_number

SMOOTHING: Final = 0.8
"""Weight of a point's neighbours in smoothing, against the point before."""
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
    run: int = 0
    """Number of its run, for axes of tokens and time."""
    is_sparse: bool = False
    """Whether each point is a separate measurement, which is marked."""

    @classmethod
    def of(cls, label: str, points: Points, *, most: int, number: int, run: int = 0) -> Curve:
        """A curve through the points, averaged to at most ``most``."""
        drawn = list(means(points, most=most))
        return cls(label, drawn, number, run, is_sparse=len(drawn) < _LEAST_TO_SMOOTH)


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
    """Local linear regression whose weights fall by a factor with each point to either side.

    A straight line stays as it is: unlike an average of the past, this one does not lag behind a
    curve that falls. No point leaves the range of the values. Value ``i`` is ``a`` of the least
    squares ``sum_j weight^|i - j| (y_j - a - b (j - i))^2``; report.js computes the same.
    """
    scale = max((abs(value) for _, value in points), default=0.0) or 1.0
    values = [value / scale for _, value in points]
    low, high = min(values, default=0.0), max(values, default=0.0)
    before, after = _moments(values, weight), _moments(values[::-1], weight)[::-1]
    fitted = []
    for (x, _), y, past, future in zip(points, values, before, after, strict=True):
        # The point itself is in both, and distances to the right are negative ones to the left.
        s0, t0 = past[0] + future[0] - 1, past[3] + future[3] - y
        s1, s2, t1 = past[1] - future[1], past[2] + future[2], past[4] - future[4]
        determinant = s0 * s2 - s1 * s1
        fit = (s2 * t0 - s1 * t1) / determinant if determinant > 1e-12 * s0 * s2 else t0 / s0
        fitted.append((x, min(max(fit, low), high) * scale))
    return fitted


def _moments(values: Sequence[float], weight: float) -> list[tuple[float, ...]]:
    """Of each point and those before it: sums of w, w d, w d^2, w y, w d y at distances d."""
    s0 = s1 = s2 = t0 = t1 = 0.0
    moments: list[tuple[float, ...]] = []
    for y in values:
        s2 = weight * (s2 + 2 * s1 + s0)
        s1 = weight * (s1 + s0)
        t1 = weight * (t1 + t0)
        s0, t0 = weight * s0 + 1, weight * t0 + y
        moments.append((s0, s1, s2, t0, t1))
    return moments


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
        unit: What the values are, beside their axis; empty where the title says it.
    """

    def __init__(
        self, title: str, curves: Sequence[Curve], *, is_smoothed: bool = True, unit: str = ""
    ) -> None:
        self.title = title
        self.unit = unit
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

    @property
    def data(self) -> dict[str, Any]:
        """Curves for the script: run, x and y of each; x is left out where it is the last one's."""
        curves: list[dict[str, Any]] = []
        last: list[float] = []
        for curve in self._curves:
            xs = [round(x, 1) if x % 1 else int(x) for x, _ in curve.points]
            ys = [float(f"{y:.5g}") for _, y in curve.points]
            curves.append({"run": curve.run, "y": ys, **({} if xs == last else {"x": xs})})
            last = xs
        return {"curves": curves, "smooth": self._is_smoothed}

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
        # What is never negative, such as a share, has no axis below 0.
        self._low = max(low - margin, 0.0) if low >= 0 else low - margin
        self._high = high + margin

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

"""Curves over the iterations: few enough points to draw, smoothed, and as paths between axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from megatron_ext.cli.pages.readable import number, short_number

SMOOTHING: Final = 0.8
"""Weight of what was before in the smoothed lines of a page."""
_LEAST_TO_SMOOTH: Final = 10

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line with its name."""

    label: str
    points: Points
    """Iteration and value in order, at least one."""
    number: int = 0
    """Of its colour."""
    is_sparse: bool = False
    """Each point is a measurement of its own, and marked."""

    @classmethod
    def of(cls, label: str, points: Points, *, most: int, number: int) -> Curve:
        """A curve through the points, or through the means of neighbours where they are many."""
        drawn = list(means(points, most=most))
        return cls(label, drawn, number, is_sparse=len(drawn) < _LEAST_TO_SMOOTH)


def means(points: Points, *, most: int) -> Iterator[tuple[float, float]]:
    """At most so many points: means of equally many neighbours each, fewer in the last."""
    size = -(-len(points) // most)
    for begin in range(0, len(points), max(size, 1)):
        part = points[begin : begin + size]
        yield (
            sum(iteration for iteration, _ in part) / len(part),
            sum(value / len(part) for _, value in part),
        )


def smoothed(points: Points, weight: float = SMOOTHING) -> list[tuple[float, float]]:
    """Means in which a point weighs ``weight`` times what the one after it does.

    The first points are not drawn towards zero: the sum is divided by the weights that are in it.
    """
    total = whole = 0.0
    found = []
    for iteration, value in points:
        total = weight * total + (1 - weight) * value
        whole = weight * whole + (1 - weight)
        found.append((iteration, total / whole))
    return found


SIDE: Final = 1000
_TICKS: Final = 5
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis, in per cent of its length from the left or from the top."""

    percent: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A curve as the data of SVG paths."""

    label: str
    number: int
    last: str
    """Its last value; of a smoothed curve the last smoothed one."""
    raw: str
    smooth: str
    """Empty where smoothing makes no sense."""
    dots: str


class Chart:
    """Curves in one pair of axes.

    Args:
        title: What is drawn.
        curves: At least one.
        is_smoothed: Draw a smoothed line too, where there are points enough.
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
        """Level lines at the ticks."""
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
        """Where a value lies, from 0 to 1; halved, so that no difference overflows."""
        return (value / 2 - self._low / 2) / (self._high / 2 - self._low / 2)

    def ticks(self) -> list[float]:
        """Round values, about ``_TICKS``."""
        rough = (self._high / 2 - self._low / 2) / _TICKS * 2
        # Beyond what floats can step through there is nothing to label.
        if not math.isfinite(rough) or rough <= 0 or math.log10(rough) < -300:
            return []
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next((unit * s for s in _STEPS if unit * s >= rough), unit * 10)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [
            round(i * step, 12) if abs(step) > 1e-9 else i * step for i in range(first, last + 1)
        ]

"""One line of a chart: few enough points to draw, and the same line smoothed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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

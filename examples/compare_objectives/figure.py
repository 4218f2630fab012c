"""The comparison as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = (
    ("bits_per_byte", "bits per byte, less is better"),
    ("bits_per_digit", "bits per digit of numerals, less is better"),
    ("agreement", "agreement with the teacher, more is better"),
)
"""Key of a student -> title of its panel."""

NEUTRAL, STUDENT, TEACHER = "#8a8a8a", "#3b82c4", "#d97706"
"""Colours that can be read on white and on black, as the background is transparent."""


def draw(results: dict[str, Any], path: Path) -> Path:
    """One panel a measure, a row an objective, a dot a student; lines for teacher and no teacher.

    Axes do not start at 0: what is compared are places, not lengths.
    """
    names = list(dict.fromkeys(run["objective"] for run in results["students"]))[::-1]
    style = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), NEUTRAL),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.titlecolor"), NEUTRAL),
        "svg.hashsalt": "objectives",
        "svg.fonttype": "none",
        "font.size": 8,
    }
    with rc_context(style):
        figure = Figure(figsize=(10, 0.26 * len(names) + 1.1), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (key, title) in zip(figure.subplots(1, 3, sharey=True), PANELS, strict=True):
            _panel(axes, results, names, key)
            axes.set_title(title, fontsize=8)
        figure.savefig(path, dpi=110, transparent=True, metadata=_without_date(path))
    return path


def _panel(axes: Axes, results: dict[str, Any], names: list[str], key: str) -> None:
    by_name = {
        name: [run[key] for run in results["students"] if run["objective"] == name]
        for name in names
    }
    for row, values in enumerate(by_name.values()):
        axes.plot(values, [row] * len(values), "o", color=STUDENT, markersize=4, alpha=0.8)
        mean = sum(values) / len(values)
        axes.annotate(
            f"{mean:.3f}", (mean, row), xytext=(0, 4), textcoords="offset points", ha="center",
            fontsize=6,
        )  # fmt: skip
    baseline = by_name.get("next_token")
    if baseline:
        axes.axvline(sum(baseline) / len(baseline), color=NEUTRAL, linestyle=":", linewidth=1)
    if key in results["teacher"]:
        axes.axvline(results["teacher"][key], color=TEACHER, linewidth=1, label="teacher")
        axes.legend(frameon=False, fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.2)
    axes.margins(x=0.12)


def _without_date(path: Path) -> dict[str, Any] | None:
    """An SVG of equal results is equal."""
    return {"Date": None} if path.suffix == ".svg" else None

"""The comparison as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = (
    ("bits_per_byte", "bits per byte, less is better"),
    ("bits_per_digit", "bits per digit of numerals, less is better"),
    ("agreement", "agreement with the teacher, more is better"),
)
"""Key of a run -> title of its panel."""


def draw(results: dict[str, Any], path: Path) -> Path:
    """One panel a measure, one bar a student; lines for the teacher and for no teacher."""
    runs = {name: run for name, run in results["runs"].items() if name != "teacher"}
    names = list(reversed(runs))
    figure = Figure(figsize=(10, 0.28 * len(names) + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, title) in zip(figure.subplots(1, 3, sharey=True), PANELS, strict=True):
        values = [runs[name][key] for name in names]
        colors = ["0.6" if name == "next_token" else "tab:blue" for name in names]
        bars = axes.barh(names, values, color=colors)
        axes.bar_label(bars, fmt="%.3f", padding=2, fontsize=7)
        if key in results["runs"]["teacher"]:
            axes.axvline(results["runs"]["teacher"][key], color="tab:orange", label="teacher")
            axes.legend(fontsize=7)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, 1.18 * max(values))
    figure.savefig(path, dpi=110)
    return path

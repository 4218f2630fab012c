"""What a run leaves to look at: ``metrics.jsonl``, a progress line, a loss-curve PNG."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from megatron_ext.files import whole_lines, write_bytes, write_text
from megatron_ext.training.metrics_writers import MetricsWriter
from megatron_ext.training.run_folder import METRICS_FILE

PLOT_FILE = "loss_curve.png"
_OF_STUDENT = "student_bits_per_byte"
_OF_TEACHER = "teacher_bits_per_byte"
"""Of the one ``teacher``; one of several has its name behind a stroke."""
_MEASURED = ("seconds", "tokens_per_second", "memory_bytes")


class MetricsLog:
    """One JSON object a line in the order of the iterations, never one twice.

    Args:
        run_dir: Folder of the run.
        last_iteration: Rows after it are dropped: a resumed run computes them again.
        writers: Get every row as well, and are closed with the log.
    """

    def __init__(
        self, run_dir: Path, *, last_iteration: int, writers: Sequence[MetricsWriter] = ()
    ) -> None:
        self._writers = writers
        self._path = run_dir / METRICS_FILE
        rows = [row for row in read_metrics(run_dir) if row["iteration"] <= last_iteration]
        write_text(self._path, "".join(_line(row) for row in rows))
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, **row: Any) -> None:
        """Append one row and flush it."""
        self._file.write(_line(row))
        self._file.flush()
        for writer in self._writers:
            writer.write(row)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        for writer in self._writers:
            writer.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of a run's ``metrics.jsonl``; a last line cut short by a crash is left out."""
    return [json.loads(line) for line in whole_lines(run_dir / METRICS_FILE)]


def result_lines(run_dir: Path, *, done: int) -> list[str]:
    """Where a finished run is, what it came to on held-out text, and what shows the rest."""
    lines = [f"the run in {run_dir} is finished: {done} iterations are done"]
    measured = [row for row in read_metrics(run_dir) if row.get(_OF_STUDENT) is not None]
    if measured:
        row = measured[-1]
        teachers = "".join(
            f", {name.replace(_OF_TEACHER, 'teacher').replace('/', ' ')} {value:.3f}"
            for name, value in row.items()
            if name.startswith(_OF_TEACHER) and value is not None
        )
        lines.append(f"held-out bits per byte: student {row[_OF_STUDENT]:.3f}{teachers}")
    return [*lines, f"next: megatron-ext report {shlex.quote(str(run_dir))}"]


def without_measurements(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row is the same whenever and wherever a run is made."""
    return {name: value for name, value in row.items() if not name.startswith(_MEASURED)}


def progress_bar(description: str, *, total: int, done: int) -> tqdm[Any]:
    """A line with the share done, the time left and the last numbers."""
    return tqdm(
        total=total,
        initial=done,
        desc=description,
        unit="it",
        dynamic_ncols=True,
        smoothing=0.1,
        mininterval=0.5,
    )


def plot_loss_curve(run_dir: Path, *, title: str) -> Path:
    """Draw every loss term over the iterations, and the held-out bits per byte beside them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, held_out = figure.subplots(1, 2)
    for axes, panel, names in (
        (losses, "training", ("loss", "kd", "ce")),
        (held_out, "held-out bits per byte", (_OF_STUDENT, _OF_TEACHER)),
    ):
        for name in names:
            points = [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name.removesuffix("_bits_per_byte"))
        axes.set_title(panel)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(title)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    path = run_dir / PLOT_FILE
    write_bytes(path, image.getvalue())
    return path


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"

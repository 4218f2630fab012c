"""A run's metrics: ``metrics.jsonl``, writers for TensorBoard and Weights & Biases, progress, plot.

The package of a writer is optional, and imported when the writer is opened. ``WANDB_MODE=offline``
keeps a run of Weights & Biases on this machine.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from megatron_ext.errors import refused_input
from megatron_ext.files import append_lines, parse_json, whole_lines, write_bytes, write_text
from megatron_ext.imports import missing_package
from megatron_ext.training.configuration.config import TrainingConfig
from megatron_ext.training.run_folder import METRICS_FILE, QUARANTINE_FILE
from megatron_ext.training.run_plan import RunPlan

if TYPE_CHECKING:
    from tqdm import tqdm


class MetricsWriter(Protocol):
    """A receiver of the rows of a run, one after the other."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row, with its ``iteration``."""

    def close(self) -> None:
        """End the writing after the last row."""


class _Writer(NamedTuple):
    package: str

    key: str
    """Key of the section ``training`` that switches it on."""

    open: Callable[[RunPlan, str, int], MetricsWriter]

    def where(self, training: TrainingConfig) -> str | None:
        """The configured folder or project; None where the writer is off."""
        target: str | None = getattr(training, self.key)
        return target


def check_writers(training: TrainingConfig) -> None:
    """Check that the packages of the configured writers are installed; nothing is imported.

    Raises:
        MissingDependencyError: A package is not installed.
    """
    for writer in _WRITERS:
        if writer.where(training) is not None and find_spec(writer.package) is None:
            raise missing_package(writer.package, feature=f"training.{writer.key}")


def open_writers(run: RunPlan, *, last_iteration: int) -> list[MetricsWriter]:
    """The configured writers of a run, opened; the main rank calls it.

    Args:
        last_iteration: Rows after it will be written again.
    """
    targets = [(writer, writer.where(run.training)) for writer in _WRITERS]
    return [
        writer.open(run, where, last_iteration) for writer, where in targets if where is not None
    ]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, which can be drawn."""
    return {
        name: value
        for name, value in row.items()
        if name != "iteration" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoardWriter:
    """A ``MetricsWriter`` for TensorBoard.

    Args:
        run: Unused; the events say nothing of it.
        folder: Folder of the event files; made when it is missing.
        last_iteration: TensorBoard hides earlier events of later iterations.
    """

    def __init__(self, run: RunPlan, folder: str, last_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = last_iteration + 1 if last_iteration else None
        self._writer = SummaryWriter(log_dir=folder, purge_step=purged)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write each number of a row under its name."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["iteration"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbWriter:
    """A ``MetricsWriter`` for Weights & Biases; a resumed run continues the same run there.

    Args:
        run: Its folder gives the name and the id; its values are the configuration there.
        project: Project of the run.
        last_iteration: Unused; a resumed run logs some iterations again.
    """

    def __init__(self, run: RunPlan, project: str, last_iteration: int) -> None:
        import wandb

        folder = run.run_dir.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=sha256(str(folder).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=dict(run.values),
        )
        # wandb's own steps only increase, but a resumed run logs some iterations again.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of a row."""
        self._run.log({"iteration": row["iteration"], **numbers(row)})

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


_WRITERS: Final = (
    _Writer("tensorboard", "tensorboard_dir", TensorBoardWriter),
    _Writer("wandb", "wandb_project", WandbWriter),
)

PLOT_FILE = "loss_curve.png"
_OF_STUDENT = "student_bits_per_byte"
_OF_TEACHER = "teacher_bits_per_byte"
"""Metric of the one ``teacher``; with several, a slash and the teacher's name follow."""
_MEASURED = ("seconds", "tokens_per_second", "memory_bytes")


class MetricsLog:
    """The log of a run: one JSON object a line, each iteration once and in order.

    Args:
        run_dir: Folder of the run.
        last_iteration: Rows after it are dropped: a resumed run computes them again.
        writers: Writers that get every row as well, and are closed with the log.
    """

    def __init__(
        self, run_dir: Path, *, last_iteration: int, writers: Sequence[MetricsWriter] = ()
    ) -> None:
        self._writers = writers
        self._path = run_dir / METRICS_FILE
        self._unwritten = b""
        self._warned: set[str] = set()
        self._curves = {name: Curve(array("q"), array("d")) for name in (*_LOSSES, *_BITS)}
        lines = []
        for row in _rows(run_dir):
            if row["iteration"] <= last_iteration:
                lines.append(_line(row))
                self._extend_curves(row)
        write_text(self._path, "".join(lines))

    def write(self, **row: Any) -> None:
        """Append one row; rows that the disk has no room for are kept, and written with the next.

        The first such row is a warning on standard error.
        """
        self._unwritten += _line(row).encode()
        self._extend_curves(row)
        try:
            self._append()
        except OSError as error:
            self._warn(self._path, error, "writes its rows")
        for writer in self._writers:
            writer.write(row)

    def draw(self) -> None:
        """Draw the loss curve; one that the disk has no room for is a warning, as in ``write``."""
        try:
            plot_loss_curve(self._path.parent, self._curves)
        except OSError as error:
            self._warn(self._path.with_name(PLOT_FILE), error, "draws its curve")

    def _extend_curves(self, row: Mapping[str, Any]) -> None:
        for name, curve in self._curves.items():
            if row.get(name) is not None:
                curve.iterations.append(row["iteration"])
                curve.values.append(row[name])

    def _warn(self, path: Path, error: OSError, what: str) -> None:
        if what not in self._warned:
            warn_of_disk(path, error, f"and {what} when there is room")
        self._warned.add(what)

    def _append(self) -> None:
        append_lines(self._path, self._unwritten)
        self._unwritten = b""

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if self._unwritten:
                self._append()
        except OSError:
            if error is None:
                raise
        finally:
            for writer in self._writers:
                writer.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of a run's ``metrics.jsonl``; a last line cut short by a crash is left out.

    Raises:
        DataError: A line is no row.
    """
    return list(_rows(run_dir))


def _rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Rows one after the other: those of a long run take gigabytes together."""
    file = run_dir / METRICS_FILE
    for number, line in enumerate(whole_lines(file), 1):
        with refused_input(
            "the line is not a row of a run", where=f"{file}:{number}", fix="remove the line"
        ):
            row = dict(parse_json(line))
            int(row["iteration"])
        yield row


def result_lines(run_dir: Path, *, done: int) -> list[str]:
    """Lines on a finished run: its folder, what was left out, its held-out bits per byte, and the
    next command."""
    lines = [f"the run in {run_dir} is finished: {done} iterations are done"]
    row: dict[str, Any] = {}
    refused = 0
    for each in _rows(run_dir):
        row = each if each.get(_OF_STUDENT) is not None else row
        refused = each.get("refused_documents", refused)
    if refused:
        lines.append(f"left out, as often as read: {refused:,} documents, see {QUARANTINE_FILE}")
    if row:
        teachers = "".join(
            f", {name.replace(_OF_TEACHER, 'teacher').replace('/', ' ')} {value:.3f}"
            for name, value in row.items()
            if name.startswith(_OF_TEACHER) and value is not None
        )
        lines.append(f"held-out bits per byte: student {row[_OF_STUDENT]:.3f}{teachers}")
    return [*lines, f"next: megatron-ext report {shlex.quote(str(run_dir))}"]


def without_measurements(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without times and memory: the part that a repeated run reproduces."""
    return {name: value for name, value in row.items() if not name.startswith(_MEASURED)}


_SECONDS_BETWEEN_LOG_LINES: Final = 10.0


def progress_bar(
    description: str,
    *,
    total: int,
    done: int = 0,
    unit: str = "it",
    is_shown: bool = True,
    delay: float = 0.0,
) -> tqdm[Any]:
    """A line with the share done, the time left and the last numbers.

    It is drawn in place on a terminal; in a log it writes a line every 10 seconds.

    Args:
        delay: Seconds before which nothing is written.
    """
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=done,
        desc=description,
        unit=unit,
        disable=not is_shown,
        delay=delay,
        dynamic_ncols=True,
        smoothing=0.1,
        mininterval=0.5 if sys.stderr.isatty() else _SECONDS_BETWEEN_LOG_LINES,
        # Asked for the time at each update, of which some take minutes.
        miniters=0,
    )


_LOSSES: Final = ("loss", "kd", "ce")
_BITS: Final = (_OF_STUDENT, _OF_TEACHER)


class Curve(NamedTuple):
    """Values over the iterations that have one: 16 bytes each, in a run of any length."""

    iterations: array[int]
    values: array[float]


def warn_of_disk(path: Path, error: OSError, consequence: str) -> None:
    """Warn on standard error of a file that the run does without."""
    sys.stderr.write(
        f"\nwarning: {path} cannot be written: {error.strerror}; the run goes on {consequence}\n"
    )


def plot_loss_curve(run_dir: Path, curves: Mapping[str, Curve]) -> None:
    """Draw every loss term over the iterations, and the held-out bits per byte beside them.

    Raises:
        OSError: The picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, held_out = figure.subplots(1, 2)
    for axes, panel, names in (
        (losses, "training", _LOSSES),
        (held_out, "held-out bits per byte", _BITS),
    ):
        for name in names:
            if curves[name].values:
                axes.plot(*curves[name], label=name.removesuffix("_bits_per_byte"))
        axes.set_title(panel)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(run_dir.name)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_bytes(run_dir / PLOT_FILE, image.getvalue())


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"

"""Writers of a run's rows besides ``metrics.jsonl``, each by a package that is optional.

A package is imported by the writer that is opened. ``WANDB_MODE=offline`` keeps a run of Weights &
Biases on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from megatron_ext.extras import missing_package
from megatron_ext.training.config import TrainingConfig
from megatron_ext.training.run_plan import RunPlan


class MetricsWriter(Protocol):
    """Takes the rows of a run, one after the other."""

    def write(self, row: Mapping[str, Any]) -> None:
        """One row, with its ``iteration``."""

    def close(self) -> None:
        """No row comes any more."""


class _Writer(NamedTuple):
    package: str

    key: str
    """Of the section ``training``."""

    open: Callable[[RunPlan, str, int], MetricsWriter]

    def where(self, training: TrainingConfig) -> str | None:
        """What the run says of it: a folder or a project; None where it is not wanted."""
        found: str | None = getattr(training, self.key)
        return found


def check_writers(training: TrainingConfig) -> None:
    """Check that what a run is to write with is installed; nothing is imported.

    Raises:
        MissingDependencyError: A package is not.
    """
    for writer in _WRITERS:
        if writer.where(training) is not None and find_spec(writer.package) is None:
            raise missing_package(writer.package, feature=f"training.{writer.key}")


def open_writers(run: RunPlan, *, last_iteration: int) -> list[MetricsWriter]:
    """The writers of a run; the main rank's.

    Args:
        last_iteration: Rows after it come again.
    """
    wanted = [(writer, writer.where(run.training)) for writer in _WRITERS]
    return [
        writer.open(run, where, last_iteration) for writer, where in wanted if where is not None
    ]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row can be drawn."""
    return {
        name: value
        for name, value in row.items()
        if name != "iteration" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _open_tensorboard(run: RunPlan, folder: str, last_iteration: int) -> MetricsWriter:
    return TensorBoardWriter(Path(folder), last_iteration=last_iteration)


def _open_wandb(run: RunPlan, project: str, last_iteration: int) -> MetricsWriter:
    return WandbWriter(project, folder=run.run_dir, values=run.values)


_WRITERS: Final = (
    _Writer("tensorboard", "tensorboard_dir", _open_tensorboard),
    _Writer("wandb", "wandb_project", _open_wandb),
)


class TensorBoardWriter:
    """A ``MetricsWriter``.

    Args:
        folder: Of the event files; made when it is missing.
        last_iteration: TensorBoard hides what it was told of later ones before.
    """

    def __init__(self, folder: Path, *, last_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = last_iteration + 1 if last_iteration else None
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purged)

    def write(self, row: Mapping[str, Any]) -> None:
        """Each number of a row under its name."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["iteration"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbWriter:
    """A ``MetricsWriter``; a run that goes on is the same one there.

    Args:
        project: That it is in.
        folder: Of the run; it gives the name and the id.
        values: The run's configuration.
    """

    def __init__(self, project: str, *, folder: Path, values: Mapping[str, Any]) -> None:
        import wandb

        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=sha256(str(folder).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=dict(values),
        )
        # Its own steps only go up: a run that was taken back logs some iterations again.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: Mapping[str, Any]) -> None:
        """The numbers of a row."""
        self._run.log({"iteration": row["iteration"], **numbers(row)})

    def close(self) -> None:
        """End the run there."""
        self._run.finish()

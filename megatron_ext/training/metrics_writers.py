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
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.run_folder import config_values


class MetricsWriter(Protocol):
    """Takes the rows of a run, one after the other."""

    def write(self, row: Mapping[str, Any]) -> None:
        """One row, with its ``iteration``."""

    def close(self) -> None:
        """No row comes any more."""


class _Writer(NamedTuple):
    package: str
    key: str
    is_wanted: Callable[[DistillConfig], bool]
    open: Callable[[DistillConfig, int], MetricsWriter]


def check_writers(config: DistillConfig) -> None:
    """Check that what a run is to write with is installed; nothing is imported.

    Raises:
        MissingDependencyError: A package is not.
    """
    for writer in _WRITERS:
        if writer.is_wanted(config) and find_spec(writer.package) is None:
            raise missing_package(writer.package, feature=writer.key)


def open_writers(config: DistillConfig, *, last_iteration: int) -> list[MetricsWriter]:
    """The writers of a run; the main rank's.

    Args:
        last_iteration: Rows after it come again.
    """
    return [w.open(config, last_iteration) for w in _WRITERS if w.is_wanted(config)]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row can be drawn."""
    return {
        name: value
        for name, value in row.items()
        if name != "iteration" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _open_tensorboard(config: DistillConfig, last_iteration: int) -> MetricsWriter:
    assert config.training.tensorboard_dir is not None
    return TensorBoardWriter(Path(config.training.tensorboard_dir), last_iteration=last_iteration)


def _open_wandb(config: DistillConfig, last_iteration: int) -> MetricsWriter:
    return WandbWriter(config)


_WRITERS: Final = (
    _Writer(
        "tensorboard",
        "training.tensorboard_dir",
        lambda config: config.training.tensorboard_dir is not None,
        _open_tensorboard,
    ),
    _Writer(
        "wandb",
        "training.wandb_project",
        lambda config: config.training.wandb_project is not None,
        _open_wandb,
    ),
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
        config: The run; its folder gives the name and the id.
    """

    def __init__(self, config: DistillConfig) -> None:
        import wandb

        folder = Path(config.run_dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.training.wandb_project,
            name=folder.name,
            id=sha256(str(folder).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=config_values(config),
        )
        # Its own steps only go up: a run that was taken back logs some iterations again.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: Mapping[str, Any]) -> None:
        """The numbers of a row."""
        self._run.log({"iteration": row["iteration"], **numbers(row)})

    def close(self) -> None:
        """End the run there."""
        self._run.finish()

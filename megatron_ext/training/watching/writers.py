"""Where rows of the log go besides ``metrics.jsonl``: each writer a package that is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from megatron_ext.extras import missing_package
from megatron_ext.training.config import DistillConfig


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
    from megatron_ext.training.watching.tensorboard_writer import TensorBoardWriter

    assert config.training.tensorboard_dir is not None
    return TensorBoardWriter(Path(config.training.tensorboard_dir), last_iteration=last_iteration)


def _open_wandb(config: DistillConfig, last_iteration: int) -> MetricsWriter:
    from megatron_ext.training.watching.wandb_writer import WandbWriter

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

"""Rows as a run of Weights & Biases. ``WANDB_MODE=offline`` keeps them on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import wandb

from megatron_ext.training.config import DistillConfig
from megatron_ext.training.run_folder import config_values
from megatron_ext.training.watching.writers import numbers


class WandbWriter:
    """A ``MetricsWriter``; a run that goes on is the same one there.

    Args:
        config: The run; its folder gives the name and the id.
    """

    def __init__(self, config: DistillConfig) -> None:
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

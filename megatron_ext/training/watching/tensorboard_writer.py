"""Rows as TensorBoard's scalars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_ext.training.watching.writers import numbers


class TensorBoardWriter:
    """A ``MetricsWriter``.

    Args:
        folder: Of the event files; made when it is missing.
        last_iteration: TensorBoard hides what it was told of later ones before.
    """

    def __init__(self, folder: Path, *, last_iteration: int) -> None:
        purged = last_iteration + 1 if last_iteration else None
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purged)

    def write(self, row: Mapping[str, Any]) -> None:
        """Each number of a row under its name."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["iteration"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

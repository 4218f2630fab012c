"""A run's microbatches one after the other, as Megatron-LM's external data loaders give them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import ConfigError
from megatron_ext.training.data.held_out import HeldOut
from megatron_ext.training.data.microbatch import Microbatch
from megatron_ext.training.trainer import Trainer

_FILES = "*/train_dataloader_dprank*.pt"
"""What Megatron-LM writes under ``--dataloader-save``, in the folder of an iteration."""

_STATE = "dataloader_state_dict"
_POSITIONS = "positions"
_REPLICAS = "replicas"


class TrainingStream:
    """This replica's microbatches, without end.

    Args:
        done: Global batches that the run is through.
        folder: ``--dataloader-save``, where checkpoints say what comes next; any layout can go on
            from them. Without a state there, what the run is through is read again and left out.
    """

    def __init__(self, trainer: Trainer, *, done: int, folder: str | None = None) -> None:
        self._trainer = trainer
        self._done = done
        self._folder = Path(folder) if folder else None
        self._microbatches: Iterator[Microbatch] | None = None

    def __iter__(self) -> TrainingStream:
        return self

    def __next__(self) -> Microbatch:
        # Not before: of the streams of an interleaved pipeline's chunks only one is read.
        if self._microbatches is None:
            self._go_on()
            self._microbatches = self._endless()
        return next(self._microbatches)

    def save_state(self) -> dict[str, Any]:
        """What Megatron-LM keeps of this replica beside a checkpoint; plain values."""
        batches = self._trainer.batches
        own = batches.positions()
        replicas = self._trainer.groups.dp_size
        return {**batches.state([own]), _POSITIONS: own, _REPLICAS: replicas}

    def _endless(self) -> Iterator[Microbatch]:
        while True:
            yield from self._trainer.microbatches()

    def _go_on(self) -> None:
        batches = self._trainer.batches
        saved = self._saved()
        if saved:
            everywhere = [state.pop(_POSITIONS) for state in saved]
            batches.load_state(batches.state(everywhere) | saved[0])
            return
        if self._done and self._trainer.groups.is_main:
            print(f"reading {self._done} global batches again, to go on behind them", flush=True)
        for _ in range(self._done):
            batches.take()

    def _saved(self) -> list[dict[str, Any]]:
        """Of every replica that saved; none where one is missing."""
        if self._folder is None or not self._done:
            return []
        files = sorted(self._folder.glob(f"iter_{self._done:07d}/{_FILES}"))
        saved = [torch.load(file, weights_only=True)[_STATE] for file in files]
        return saved if saved and len(saved) == saved[0][_REPLICAS] else []


class HeldOutStream:
    """This replica's held-out microbatches, from the first again behind the last.

    Raises:
        ConfigError: A teacher's targets come from a cache, which has none of held-out text.
    """

    def __init__(self, trainer: Trainer, held_out: HeldOut) -> None:
        for name in trainer.cached_teachers:
            raise ConfigError(
                "Megatron-LM measures the whole loss on held-out text, of which a cache has no "
                "targets",
                where="data.validation",
                got=f"{trainer.config.section_of(name)}.cache",
                fix="leave one of them out",
            )
        self._trainer = trainer
        self._held_out = held_out
        self._microbatches = self._endless()

    def __iter__(self) -> HeldOutStream:
        return self

    def __next__(self) -> Microbatch:
        return next(self._microbatches)

    def __len__(self) -> int:
        """Global batches, which Megatron-LM asks for under ``--full-validation``."""
        return sum(1 for _ in self._held_out.global_batches(self._trainer.replica))

    def _endless(self) -> Iterator[Microbatch]:
        while True:
            for rows in self._held_out.global_batches(self._trainer.replica):
                for samples in rows:
                    yield self._trainer.collate(samples, held_out=self._held_out)

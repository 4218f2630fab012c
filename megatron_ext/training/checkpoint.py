"""Checkpoints through ``megatron.core.dist_checkpointing``, readable under any layout.

``checkpoint_writer`` writes them, ``checkpoint_folder`` has their places and names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoint_folder import checkpoint_path
from megatron_ext.training.checkpoint_writer import CheckpointWriter
from megatron_ext.training.config import ModelConfig
from megatron_ext.training.models import ModelChunks, load_weights_of, sharded_weights

_LOADING_ERRORS = (
    CheckpointingException,
    CheckpointException,
    OSError,
    EOFError,
    UnpicklingError,
    KeyError,
    RuntimeError,
    # megatron-core 0.16 fails in its own error message when the file of common state is missing.
    AttributeError,
)


def save_checkpoint(
    folder: Path,
    iteration: int,
    state: dict[str, Any],
    *,
    groups: ProcessGroups,
    keep: int,
    files: Sequence[Path] = (),
) -> Path:
    """Save a sharded state from all ranks, move ``latest``, drop all but the ``keep`` newest.

    Args:
        files: Files and folders that are copied into the checkpoint, where they exist.

    Collectives: those of ``CheckpointWriter.save``.

    Raises:
        CheckpointError: It could not be written; on every rank.
    """
    CheckpointWriter(folder, groups=groups, keep=keep, files=files).save(iteration, state)
    return checkpoint_path(folder, iteration)


def load_common(checkpoint: Path) -> dict[str, Any]:
    """State of a checkpoint that all ranks share, as plain values: all but tensors and rank state.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return dict(dist_checkpointing.load_common_state_dict(str(checkpoint)))
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            "the checkpoint cannot be read",
            where=checkpoint,
            got=_reason(error),
            fix="copy it again: a file of it is missing or cut short",
        ) from error


def load_checkpoint(checkpoint: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill a sharded state from a checkpoint saved under any layout.

    Collectives: those of ``dist_checkpointing.load``.

    Raises:
        CheckpointError: The checkpoint does not hold this state.
    """
    try:
        return dict(dist_checkpointing.load(state, str(checkpoint)))
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            "the checkpoint cannot be loaded into the model",
            where=checkpoint,
            got=_reason(error),
            fix="check that its files are whole and that the model's configuration is the one it "
            "was trained with",
        ) from error


def load_weights(checkpoint: Path, chunks: ModelChunks) -> None:
    """Load a model's weights alone.

    Args:
        checkpoint: One iteration's folder.
        chunks: This rank's part of the model, under any layout.

    Collectives: those of ``load_checkpoint``.

    Raises:
        CheckpointError: Unreadable, or of another shape.
    """
    load_weights_of(chunks, load_checkpoint(checkpoint, sharded_weights(chunks)))


def _reason(error: BaseException) -> str:
    """First line of an error, on whichever rank it occurred."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def checkpoint_model(checkpoint: Path) -> ModelConfig:
    """The configuration of the student that a checkpoint was saved with.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not contain it.
    """
    run = load_common(checkpoint).get("run")
    student = run.get("config", {}).get("student") if isinstance(run, Mapping) else None
    if not isinstance(student, Mapping):
        raise CheckpointError(
            "the checkpoint does not say what model it is of",
            where=checkpoint,
            fix="name checkpoints of megatron-ext distill or import-hf",
        )
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    return ModelConfig(**{name: value for name, value in student.items() if name in fields})

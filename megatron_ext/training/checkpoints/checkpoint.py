"""Checkpoints through ``megatron.core.dist_checkpointing``, readable under any layout.

``writer`` writes them, ``folder`` has their places and names, ``manifest`` the sums of their files,
and ``reader`` reads these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoints.folder import checkpoint_path
from megatron_ext.training.checkpoints.manifest import Manifest
from megatron_ext.training.checkpoints.model_check import known_fields
from megatron_ext.training.checkpoints.reader import (
    READING_ERRORS,
    CheckpointReader,
    check_format,
    read_common,
)
from megatron_ext.training.checkpoints.writer import CheckpointWriter
from megatron_ext.training.configuration.config import ModelConfig
from megatron_ext.training.configuration.lora import LoraConfig
from megatron_ext.training.megatron_models.megatron_parts import needed
from megatron_ext.training.megatron_models.models import (
    ModelChunks,
    load_weights_of,
    sharded_weights,
)

LOADING_ERRORS: Final = (CheckpointingException, CheckpointException, *READING_ERRORS)
"""Errors of loading a checkpoint whose files are damaged, or of another model."""


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


def load_common(checkpoint: Path, *, verify: bool = True) -> dict[str, Any]:
    """State of a checkpoint that all ranks share, as plain values: all but tensors and rank state.

    Args:
        verify: Check the file against the checkpoint's manifest.

    Raises:
        CheckpointError: It cannot be read.
    """
    manifest = Manifest.of(checkpoint, verify=verify)
    check_format(manifest)
    return read_common(manifest)


def load_checkpoint(
    checkpoint: Path, state: dict[str, Any], *, verify: bool = True
) -> dict[str, Any]:
    """Fill a sharded state from a checkpoint saved under any layout.

    Args:
        verify: Check every file against the checkpoint's manifest, each on one rank.

    Collectives: two all-gathers of an object, and those of ``dist_checkpointing.load``.

    Raises:
        CheckpointError: A file is damaged, or the checkpoint does not hold this state.
    """
    reader, common = _opened(checkpoint, verify=verify)
    loaded: dict[str, Any] = {}
    failed: CheckpointError | None = None
    try:
        with needed("load_common").replaced(lambda _: lambda *_, **__: common):
            loaded = dict(
                dist_checkpointing.load(
                    state, str(checkpoint), sharded_strategy=PlainShardedStrategy(reader)
                )
            )
    except (MemoryError, torch.OutOfMemoryError, dist.DistError):
        raise
    except LOADING_ERRORS as error:
        failed = _own(error) or _unfit(checkpoint, error)
        failed.__cause__ = error
    # Up to 0.18 megatron-core raises a rank's error on every rank, from 0.19 on that rank alone.
    process_groups.raise_on_all(failed)
    return loaded


def _opened(checkpoint: Path, *, verify: bool) -> tuple[CheckpointReader, dict[str, Any]]:
    """Reader and common state of a checkpoint whose files all ranks have checked together."""
    with process_groups.raising_on_all():
        manifest = Manifest.of(checkpoint, verify=verify)
        check_format(manifest)
        common, reader = read_common(manifest), CheckpointReader(manifest)
        manifest.check(part=dist.get_rank(), parts=dist.get_world_size())
    return reader, common


def load_weights(checkpoint: Path, chunks: ModelChunks, *, verify: bool = True) -> None:
    """Load a model's weights alone.

    Args:
        checkpoint: One iteration's folder.
        chunks: This rank's part of the model, under any layout.
        verify: As in ``load_checkpoint``.

    Collectives: those of ``load_checkpoint``.

    Raises:
        CheckpointError: Unreadable, or of another shape.
    """
    load_weights_of(chunks, load_checkpoint(checkpoint, sharded_weights(chunks), verify=verify))


def _unfit(checkpoint: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "the checkpoint cannot be loaded into the model",
        where=checkpoint,
        got=_reason(error),
        fix="check that its files are whole and that the model's configuration is the one it "
        "was trained with",
    )


def _own(error: BaseException) -> CheckpointError | None:
    """An error of our reader, on whichever rank it occurred."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((own for own, _ in failures if isinstance(own, CheckpointError)), None)


def _reason(error: BaseException) -> str:
    """First line of an error, on whichever rank it occurred."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def checkpoint_model(checkpoint: Path, *, verify: bool = True) -> ModelConfig:
    """The configuration of the student that a checkpoint was saved with.

    Args:
        verify: As in ``load_common``.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not contain it.
    """
    student = checkpoint_config(checkpoint, verify=verify).get("student")
    if not isinstance(student, Mapping):
        raise CheckpointError(
            "the checkpoint does not say what model it is of",
            where=checkpoint,
            fix="name checkpoints of megatron-ext distill or import-hf",
        )
    return ModelConfig(**known_fields(student, ModelConfig))


def checkpoint_lora(checkpoint: Path) -> LoraConfig | None:
    """The adapters of the student that a checkpoint was saved with; None where it has none.

    Its file is not checked: whoever loads the tensors does that.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    lora = checkpoint_config(checkpoint, verify=False).get("lora")
    if not isinstance(lora, Mapping):
        return None
    return LoraConfig(**known_fields(lora, LoraConfig))


def checkpoint_config(checkpoint: Path, *, verify: bool = True) -> Mapping[str, Any]:
    """The configuration of the run that a checkpoint is of; empty where it does not say.

    Args:
        verify: As in ``load_common``.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    run = load_common(checkpoint, verify=verify).get("run")
    config = run.get("config") if isinstance(run, Mapping) else None
    return config if isinstance(config, Mapping) else {}


class PlainShardedStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """megatron-core's strategy for sharded state, with a reader that runs nothing."""

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__()
        self._reader = reader

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, *writer: str) -> Any:
        """Load the state with the reader; from 0.17 on, megatron-core names what wrote it."""
        with needed("file_reader").replaced(lambda _: lambda *_, **__: self._reader):
            return super().load(sharded_state_dict, checkpoint_dir, *writer)

"""Checkpoints through ``megatron.core.dist_checkpointing``: complete or absent, never in between.

``checkpoints/iter_0000040`` holds one iteration, readable under any layout; ``checkpoints/latest``
names the newest complete one. A checkpoint is written beside its final name and renamed when every
rank is done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.atomic_file import write_text
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError

_LATEST = "latest"
_PREFIX = "iter_"


def save_checkpoint(
    folder: Path,
    iteration: int,
    state: dict[str, Any],
    *,
    groups: ProcessGroups,
    keep: int,
) -> Path:
    """Save a sharded state from all ranks, move ``latest``, drop all but the ``keep`` newest.

    Collectives: those of ``dist_checkpointing.save`` and two barriers.
    """
    final = folder / f"{_PREFIX}{iteration:07d}"
    partial = folder / f".{final.name}.partial"
    if groups.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(partial))
    dist.barrier()
    if groups.is_main:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        write_text(folder / _LATEST, final.name)
        for old in _complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load_checkpoint(checkpoint: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill a sharded state from a checkpoint saved under any layout.

    Raises:
        CheckpointError: The checkpoint does not hold this state.
    """
    try:
        return dict(dist_checkpointing.load(state, str(checkpoint)))
    except (CheckpointingException, CheckpointException, KeyError, RuntimeError) as error:
        raise CheckpointError(
            "the checkpoint does not fit the model",
            where=checkpoint,
            got=str(error)[:300],
            fix="check that the model's configuration is the one it was trained with",
        ) from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None.

    Raises:
        CheckpointError: ``latest`` names a checkpoint that is not there.
    """
    pointer = folder / _LATEST
    if not pointer.exists():
        return None
    checkpoint = folder / pointer.read_text(encoding="utf-8").strip()
    if not checkpoint.is_dir():
        raise CheckpointError(
            "the latest checkpoint is missing",
            where=pointer,
            got=checkpoint.name,
            expected=f"one of {', '.join(p.name for p in _complete_checkpoints(folder)) or 'none'}",
            fix=f"write the name of a checkpoint that exists into {pointer}",
        )
    return checkpoint


def find_checkpoint(path: str) -> Path:
    """A checkpoint folder, or the latest one of a run's ``checkpoints``.

    Raises:
        CheckpointError: There is none.
    """
    folder = Path(path)
    if dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        return folder
    checkpoint = latest_checkpoint(folder) if folder.is_dir() else None
    if checkpoint is None:
        raise CheckpointError(
            "no checkpoint found",
            where=path,
            expected="a run's checkpoints folder, or one iteration in it",
            fix="check teacher.checkpoint and initial_checkpoint",
        )
    return checkpoint


def load_weights(path: str, gpt: GPTModel, *, fingerprint: str) -> None:
    """Load a model's weights alone, and check that it was trained on this tokenizer.

    Args:
        path: As for ``find_checkpoint``.
        gpt: This rank's stage of the model, under any layout.
        fingerprint: Of the tokenizer that the run gives the model.

    Raises:
        CheckpointError: Missing, of another shape, or of another tokenizer.
    """
    checkpoint = find_checkpoint(path)
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    trained_on = _tokenizer_fingerprint(common)
    if trained_on is not None and trained_on != fingerprint:
        raise CheckpointError(
            "the model was trained with another tokenizer",
            where=checkpoint,
            got=f"vocabulary {trained_on[:12]}",
            expected=f"{fingerprint[:12]}, the configured tokenizer",
            fix="configure the tokenizer of the checkpoint",
        )
    state = load_checkpoint(checkpoint, {"model": gpt.sharded_state_dict()})
    gpt.load_state_dict(state["model"])


def _tokenizer_fingerprint(common: Mapping[str, Any]) -> str | None:
    run = common.get("run")
    return run.get("tokenizer_fingerprint") if isinstance(run, Mapping) else None


def _complete_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())

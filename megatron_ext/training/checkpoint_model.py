"""The model that one of our checkpoints says it is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.errors import CheckpointError
from megatron_ext.training.checkpoint import load_common
from megatron_ext.training.config import ModelConfig


def checkpoint_model(checkpoint: Path) -> ModelConfig:
    """The configuration of the student that a checkpoint was saved with.

    Raises:
        CheckpointError: It cannot be read, or does not say.
    """
    run = load_common(checkpoint).get("run")
    student = run.get("config", {}).get("student") if isinstance(run, Mapping) else None
    if not isinstance(student, Mapping):
        raise CheckpointError(
            "the checkpoint does not say what model it is of",
            where=checkpoint,
            fix="name checkpoints of megatron-ext distill or import-hf",
        )
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    return ModelConfig(**{name: value for name, value in student.items() if name in known})

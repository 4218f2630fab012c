"""Whether a HuggingFace checkpoint is of the model that a run builds; no tensor is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    CheckpointFiles,
    is_checkpoint_folder,
)
from megatron_ext.huggingface.families import Family
from megatron_ext.huggingface.model_settings import (
    check_tensors,
    family_of,
    model_settings,
    tensor_map,
)
from megatron_ext.huggingface.tensor_map import TensorMap
from megatron_ext.training.config import ModelConfig

_FREE: Final = ("window_size", "vocab_size", "init_method_std")
"""Settings that do not change what the model computes on the sequences of a run."""


def check_if_huggingface(checkpoint: Path, model: ModelConfig) -> bool:
    """Check a checkpoint that is of HuggingFace against the model that it is to fill.

    Returns:
        Whether it is of HuggingFace; nothing is checked otherwise.

    Raises:
        CheckpointError: It is of another model, or not whole.
    """
    if not is_checkpoint_folder(checkpoint):
        return False
    checked(CheckpointFiles(checkpoint), model)
    return True


def checked(files: CheckpointFiles, model: ModelConfig) -> tuple[Family, TensorMap]:
    """The family and the tensors of a checkpoint that was found to be of a model.

    Raises:
        CheckpointError: It is not, or it is not whole.
    """
    family, settings = family_of(files), model_settings(files)
    check_same_model(settings, model, where=files.folder / CONFIG_FILE)
    tensors = tensor_map(family, settings)
    check_tensors(files, tensors, family)
    return family, tensors


def check_same_model(settings: Mapping[str, Any], model: ModelConfig, *, where: Path) -> None:
    """Compare what a ``config.json`` says with a model.

    Raises:
        CheckpointError: They differ.
    """
    configured = full_settings(model)
    for name, value in settings.items():
        if name not in _FREE and configured[name] != value:
            raise CheckpointError(
                f"the checkpoint is of a model with another {name}",
                where=where,
                got=configured[name],
                expected=value,
                fix="leave the keys of the model out: they are taken from the checkpoint",
            )


def full_settings(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model, with what follows from others where they are not given."""
    return dataclasses.asdict(model) | {
        "num_query_groups": model.num_query_groups or model.num_attention_heads,
        "kv_channels": model.head_width,
        "ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
    }

"""Checks of checkpoints against the models of a run; no tensor is read."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    CheckpointFiles,
    is_checkpoint_folder,
)
from megatron_ext.huggingface.family import Family
from megatron_ext.huggingface.model_settings import (
    any_model_settings,
    check_tensors,
    family_of,
    longest_sequence,
    model_settings,
    tensor_map,
)
from megatron_ext.huggingface.tensor_map import TensorMap
from megatron_ext.imports import missing_package
from megatron_ext.training.checkpoints.tokenizer import checkpoint_record
from megatron_ext.training.configuration.config import ModelConfig
from megatron_ext.training.run_plan import TeacherPlan

_FREE: Final = (
    *("hf", "seq_length", "vocab_size", "make_vocab_size_divisible_by", "init_method_std"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
)
"""Settings that do not change the model's predictions on the sequences of a run."""


_POSITIONS: Final = ("rotary", "rope", "use_rope", "local_rotary")
"""Beginnings of the names of settings of rotated positions."""


def check_model(checkpoint: Path, model: ModelConfig, *, learns: bool = False) -> bool:
    """Check a checkpoint against the model that it is to fill.

    A weight that the model lacks would be left unread, and a setting without weights go unseen.

    Args:
        checkpoint: A folder of HuggingFace, or one iteration's of ours.
        learns: Whether the model may rotate positions otherwise than in a checkpoint of ours,
            which it then gets used to.

    Returns:
        Whether the checkpoint says which model it is of.

    Raises:
        CheckpointError: It is of another model, or not whole.
    """
    if is_checkpoint_folder(checkpoint):
        checked(CheckpointFiles(checkpoint), model)
        return True
    student = checkpoint_record(checkpoint).get("config", {}).get("student")
    if not isinstance(student, Mapping):
        return False
    settings = full_settings(ModelConfig(**known_fields(student, ModelConfig)))
    check_same_model(
        {k: v for k, v in settings.items() if not (learns and k.startswith(_POSITIONS))},
        model,
        where=checkpoint,
        fix="give the model the keys that its run has in config.yaml under student",
    )
    return True


def known_fields(values: Mapping[str, Any], config_type: Any) -> dict[str, Any]:
    """Values of the fields that a configuration has in this version; lists of JSON as tuples."""
    names = {field.name for field in dataclasses.fields(config_type)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in names
    }


def checked(files: CheckpointFiles, model: ModelConfig) -> tuple[Family, TensorMap]:
    """Check that a checkpoint is of a model, and return its family and tensors.

    Raises:
        CheckpointError: It is of another model, or not whole.
    """
    family, settings = family_of(files), model_settings(files)
    check_same_model(settings, model, where=files.folder / CONFIG_FILE)
    tensors = tensor_map(family, settings)
    check_tensors(files, tensors, family)
    return family, tensors


def check_same_model(
    settings: Mapping[str, Any],
    model: ModelConfig,
    *,
    where: Path,
    fix: str = "leave the keys of the model out: they are taken from the checkpoint",
) -> None:
    """Compare the settings of a checkpoint's model with those of a run's.

    Raises:
        CheckpointError: They differ.
    """
    configured = full_settings(model)
    for name, value in settings.items():
        is_free = name in _FREE
        if name == "window_size" and not model.has_window:
            # A window that no sequence reaches is as none.
            is_free = value is None or value >= model.seq_length
        if not is_free and configured[name] != value:
            raise CheckpointError(
                f"the checkpoint is of a model with another {name}",
                where=where,
                got=configured[name],
                expected=value,
                fix=fix,
            )


def full_settings(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model, with the defaults that follow from other fields filled in."""
    return dataclasses.asdict(model) | {
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_width,
        "moe_router_expert_bias": model.has_expert_bias,
        "ffn_hidden_size": model.ffn_width,
        "moe_ffn_hidden_size": None if model.num_experts is None else model.expert_width,
    }


def length_doubts(checkpoint: Path, model: ModelConfig) -> list[str]:
    """A warning of sequences that are longer than a HuggingFace folder's model supports."""
    if not is_checkpoint_folder(checkpoint):
        return []
    longest = longest_sequence(CheckpointFiles(checkpoint))
    if longest is None or model.seq_length <= longest:
        return []
    return [
        f"rows of {model.seq_length:,} tokens (seq_length) are longer than the {longest:,} that "
        f"the model reads by its {CONFIG_FILE}"
    ]


def check_teacher(teacher: TeacherPlan) -> None:
    """Check the checkpoint of a teacher, if it has one; with ``library`` huggingface its sequence
    length.

    Raises:
        ConfigError: transformers is missing, or the sequences are longer than the model's.
        MissingDependencyError: torchao is missing, and the weights are to be rounded.
        CheckpointError: The folder is not of HuggingFace or not whole, or the model is another.
    """
    if teacher.config.ema_decay is not None:
        return
    section, model = teacher.section, teacher.config.model
    is_cached, library = teacher.config.cache is not None, teacher.config.library
    if teacher.config.engine is not None or (is_cached and library != "huggingface"):
        # Its weights are where it runs, or ran. A cache of its own compares them when it is opened.
        if is_checkpoint_folder(teacher.checkpoint):
            files = CheckpointFiles(teacher.checkpoint)
            check_same_model(model_settings(files), model, where=files.folder / CONFIG_FILE)
        return
    if library != "huggingface":
        check_model(teacher.checkpoint, model)
        return
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "library huggingface needs transformers, which is not installed",
            where=f"{section}.library",
            fix='install it: pip install "transformers>=4.56"',
        )
    precision = teacher.config.weight_precision
    if precision is not None and importlib.util.find_spec("torchao") is None:
        raise missing_package("torchao", feature=f"{section}.weight_precision {precision}")
    folder = teacher.checkpoint
    if not is_checkpoint_folder(folder):
        raise CheckpointError(
            "library huggingface reads folders of HuggingFace",
            where=folder,
            got=f"no {CONFIG_FILE} of a model",
            fix="name such a folder, or set library to megatron",
        )
    files = CheckpointFiles(folder)
    if not is_cached:
        _ = files.stored
    settings = any_model_settings(files)
    sizes = {key: value for key, value in settings.items() if key in ("hidden_size", "num_layers")}
    check_same_model(sizes, model, where=folder / CONFIG_FILE)
    longest = longest_sequence(files)
    if longest is not None and model.seq_length > longest:
        raise ConfigError(
            "the teacher's sequences are longer than the model supports",
            where=f"{section}.model.seq_length",
            got=model.seq_length,
            expected=f"at most {longest}, as {folder / CONFIG_FILE} says",
        )

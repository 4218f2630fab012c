"""Whether a HuggingFace folder can be the teacher that a run asks for; no tensor is read."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    CheckpointFiles,
    is_checkpoint_folder,
)
from megatron_ext.huggingface.model_settings import any_model_settings, longest_sequence
from megatron_ext.training.config import DistillConfig


def check_huggingface_teacher(config: DistillConfig, name: str, folder: Path) -> None:
    """Check the files of a teacher with ``library`` huggingface, and what a run wants of it.

    Raises:
        ConfigError: transformers is missing, or the run has an order of heads that needs weights of
            megatron-core.
        CheckpointError: The folder is not of HuggingFace or not whole, or the model is another.
    """
    section, teacher = config.section_of(name), config.named_teachers[name]
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "library huggingface needs transformers, which is not installed",
            where=f"{section}.library",
            fix='install it: pip install "transformers>=4.56"',
        )
    if config.training.vocabulary_layout != "original":
        raise ConfigError(
            "a model of transformers has its head in the order of the ids",
            where=f"{section}.library",
            got=f"training.vocabulary_layout {config.training.vocabulary_layout}",
            expected="original",
        )
    if not is_checkpoint_folder(folder):
        raise CheckpointError(
            "library huggingface reads folders of HuggingFace",
            where=folder,
            got=f"no {CONFIG_FILE} of a model",
            fix="name such a folder, or set library to megatron",
        )
    files = CheckpointFiles(folder)
    _ = files.tensors
    for key, value in any_model_settings(files).items():
        given = getattr(teacher.model, key)
        if key in ("hidden_size", "num_layers") and given != value:
            raise CheckpointError(
                f"the checkpoint is of a model with another {key}",
                where=folder / CONFIG_FILE,
                got=given,
                expected=value,
                fix="leave the keys of the model out: they are taken from the checkpoint",
            )
    longest = longest_sequence(files)
    if longest is not None and teacher.model.seq_length > longest:
        raise ConfigError(
            "the teacher was not made for sequences as long",
            where=f"{section}.model.seq_length",
            got=teacher.model.seq_length,
            expected=f"at most {longest}, as {folder / CONFIG_FILE} says",
        )

"""What a teacher elsewhere sends, and what both sides must have alike; the same on each."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from megatron_ext.teachers.targets.form import Precision, TargetForm
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.training.checkpoint_folder import find_checkpoint
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.teacher_cache.identity import (
    WEIGHTS,
    WITHOUT_INFLUENCE,
    weights_identity,
)


def served_form(config: DistillConfig, name: str, tokenizer: MegatronTokenizerText) -> TargetForm:
    """The form of a teacher's targets.

    Raises:
        ConfigError: There are not so many tokens to send.
    """
    teacher = config.named_teachers[name]
    serving = teacher.serving
    precision: Precision | None = serving.target_precision
    if precision is None and serving.targets == "hidden":
        precision = config.training.precision
    return TargetForm.of(
        serving.targets,
        precision=precision,
        top_k=serving.top_k,
        hidden_size=teacher.model.hidden_size,
        vocab_size=tokenizer.vocab_size,
    )


def served_identity(
    config: DistillConfig, name: str, tokenizer: MegatronTokenizerText
) -> dict[str, str | int]:
    """What the targets depend on, by what an error calls it; the weights as they are named.

    A launch and its processes have one configuration, whose checkpoint may still have gone on
    between two of them looking at it.
    """
    teacher = config.named_teachers[name]
    model = {
        key: value
        for key, value in dataclasses.asdict(teacher.model).items()
        if key not in WITHOUT_INFLUENCE
    }
    checkpoint = find_checkpoint(teacher.checkpoint, where=f"{config.section_of(name)}.checkpoint")
    return {
        "model": _hash(model),
        "tokenizer": _hash(tokenizer_identity(tokenizer)),
        "precision": config.training.precision,
        "checkpoint": checkpoint.name,
    }


def with_weights(
    identity: dict[str, str | int], config: DistillConfig, name: str
) -> dict[str, str | int]:
    """``identity`` with the hash of all weights, for a server that somebody else started.

    Raises:
        CheckpointError: A file cannot be read.
    """
    where = f"{config.section_of(name)}.checkpoint"
    checkpoint = find_checkpoint(config.named_teachers[name].checkpoint, where=where)
    without_name = {key: value for key, value in identity.items() if key != "checkpoint"}
    return without_name | {WEIGHTS: weights_identity(checkpoint)}


def described(name: str, placement: str, form: TargetForm) -> str:
    """One line for a person: ``teacher big on its own ranks: hidden 64 in fp32, 256 bytes ...``."""
    parts = " + ".join(f"{width:,} {part}" for part, width in form.parts.items())
    return f"teacher {name} ({placement}): {form}, {form.bytes_per_token:,} bytes a token = {parts}"


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()

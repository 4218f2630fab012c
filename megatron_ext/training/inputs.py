"""Inputs of a run, read and checked before any model is built: tokenizers, text, projections.

Cheap checks come first and nothing is written, so that a wrong start ends in seconds and leaves no
trace. torch is loaded late, and megatron-core only where the text is in its own format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.data.reading_order import read_blend
from megatron_ext.errors import ConfigError
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.build import names_tokenizer
from megatron_ext.training.checkpoints.folder import find_checkpoint, latest_checkpoint
from megatron_ext.training.checkpoints.model_check import (
    check_model,
    check_teacher,
    length_doubts,
)
from megatron_ext.training.checkpoints.tokenizer import (
    check_same_tokenizer,
    teacher_doubts,
    tokenizer_doubts,
)
from megatron_ext.training.configuration.config import TEACHER as TEACHER
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.metrics import check_writers
from megatron_ext.training.run_folder import CHECKPOINTS, check_run_folder, check_same_text
from megatron_ext.training.run_plan import TeacherPlan

if TYPE_CHECKING:
    from megatron_ext.training.run_data import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherInputs:
    """Tokenizer and projection of one teacher."""

    tokenizer: MegatronTokenizerText

    projection: SparseProjection | None
    """The configured projection; None where the run builds its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything a run reads except checkpoints; the same on every rank."""

    tokenizer: MegatronTokenizerText
    teachers: Mapping[str, TeacherInputs]
    """By name."""

    data: RunData

    doubts: Mapping[str, list[str]] = field(default_factory=dict)
    """Warnings by checkpoint: a tokenizer that may not be its model's, rows that are too long for
    it, and the checkpoint that is taken where a run's folder is named."""

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user before the run starts."""
        return [f"{folder}: {doubt}" for folder, doubts in self.doubts.items() for doubt in doubts]


def read_inputs(config: DistillConfig, *, world_size: int, has_targets: bool = True) -> Inputs:
    """Check and read what ``config`` names, for a run on ``world_size`` processes.

    Args:
        has_targets: Whether cached targets are there to be checked; not while they are made.

    Raises:
        MegatronExtError: Anything that can be known to be wrong before a model is built.
    """
    _check_batch(config, world_size)
    read_blend(config.data.train, where="data.train")
    # Objectives bring torch with them.
    from megatron_ext.training.run_loss import check_loss, check_objectives

    # Before the run folder, which would call a mistyped objective a different experiment.
    check_objectives(config)
    check_run_folder(config)
    check_writers(config.training)
    _check_checkpoints(config)
    reads = config.data.conversations
    tokenizer = read_tokenizer(config.tokenizer, "tokenizer", conversations=reads)
    teachers = {
        name: _teacher(config, name, tokenizer, conversations=reads)
        for name in config.named_teachers
    }
    check_loss(config, tokenizer, {name: read.tokenizer for name, read in teachers.items()})
    doubts = _doubts(config, tokenizer, teachers)
    from megatron_ext.training.run_data import RunData

    lengths = {name: teacher.model.seq_length for name, teacher in config.named_teachers.items()}
    data = RunData.read(
        config, tokenizer, {name: (teachers[name].tokenizer, lengths[name]) for name in teachers}
    )
    check_same_text(Path(config.run_dir), data.summary())
    inputs = Inputs(tokenizer=tokenizer, teachers=teachers, data=data, doubts=doubts)
    if has_targets:
        _check_targets(config, inputs)
    return inputs


def _teacher(
    config: DistillConfig, name: str, student: MegatronTokenizerText, *, conversations: bool
) -> TeacherInputs:
    section = f"{config.section_of(name)}.tokenizer"
    tokenizer = read_tokenizer(
        config.named_teachers[name].tokenizer, section, conversations=conversations
    )
    path = config.projection_of(name)
    projection = None
    if config.distils and path is not None:
        projection = SparseProjection.load(
            path, student, tokenizer, tell=lambda warning: write_warnings([warning])
        )
    return TeacherInputs(tokenizer=tokenizer, projection=projection)


def read_tokenizer(
    config: TokenizerConfig, section: str, *, conversations: bool = False
) -> MegatronTokenizerText:
    """The tokenizer that a section of the configuration describes.

    Args:
        section: Name of the section, for errors.
        conversations: Whether it has to render conversations.

    Raises:
        ConfigError: No tokenizer is named, it is for images or numbers, or lacks a prompt format.
        TokenizerError: It cannot be read.
    """
    if not names_tokenizer(config):
        raise ConfigError(
            "no tokenizer is named",
            where=f"{section}.model",
            expected="a tokenizer file, a directory that holds one, or a library without files",
            fix=f"set it{_flag(section, 'model')}",
        )
    if config.mode == "multimodal":
        raise ConfigError("a run reads no images", got="mode multimodal", where=section)
    tokenizer = build_tokenizer(config)
    if tokenizer.library == "null":
        raise ConfigError(
            "a run reads texts, of which a null tokenizer knows only numbers",
            where=section,
            got="library null",
            fix="take another library; byte-level needs no file either",
        )
    if conversations and tokenizer.prompt_config is None:
        has_template = bool(tokenizer.chat_templates)
        raise ConfigError(
            "conversations need a prompt format",
            got="a tokenizer without one, "
            + ("whose chat template is not asked for" if has_template else "or a chat template"),
            fix=f"set {section}.prompt_format"
            + (" to auto" if has_template else "")
            + _flag(section, "prompt-format auto" if has_template else "prompt-format")
            + ("" if has_template else ", see docs/prompt_formats.md"),
            where=section,
        )
    return tokenizer


def _flag(section: str, flag: str) -> str:
    """The end of a hint with the flag; empty for one of several teachers, which have no flags."""
    if section.startswith("teachers."):
        return ""
    return f", or pass --{section.replace('.', '-')}-{flag}"


def write_warnings(warnings: Iterable[str]) -> None:
    """Write a line for each warning, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
        sys.stderr.flush()


def _check_batch(config: DistillConfig, world_size: int) -> None:
    training, parallel = config.training, config.parallel
    replicas = parallel.layout.replicas(world_size)
    step = training.micro_batch_size * replicas
    if training.global_batch_size % step:
        raise ConfigError(
            "global_batch_size does not divide into microbatches",
            got=training.global_batch_size,
            expected=(
                f"a multiple of {step} (micro_batch_size {training.micro_batch_size} x "
                f"{replicas} data-parallel replicas)"
            ),
            fix="change global_batch_size, micro_batch_size or the number of processes",
        )
    stages = parallel.pipeline_model_parallel_size
    microbatches = training.global_batch_size // step
    if parallel.virtual_pipeline_model_parallel_size > 1 and microbatches % stages:
        raise ConfigError(
            "an interleaved pipeline takes as many microbatches at a time as it has stages",
            got=f"{microbatches} microbatches a replica (global_batch_size "
            f"{training.global_batch_size} / {step})",
            expected=f"a multiple of {stages}, pipeline_model_parallel_size",
            fix="change global_batch_size or micro_batch_size, or set "
            "virtual_pipeline_model_parallel_size to 1",
        )


def _check_checkpoints(config: DistillConfig) -> None:
    checkpoints = Path(config.run_dir) / CHECKPOINTS
    if config.distils:
        for name in config.named_teachers:
            check_teacher(TeacherPlan.of(config, name))
    if config.initial_checkpoint and latest_checkpoint(checkpoints) is None:
        start = find_checkpoint(config.initial_checkpoint, where="initial_checkpoint")
        check_model(start, config.student, learns=True)


def _doubts(
    config: DistillConfig,
    tokenizer: MegatronTokenizerText,
    teachers: Mapping[str, TeacherInputs],
) -> dict[str, list[str]]:
    """Check that every model has learned the ids of its tokenizer; warnings by checkpoint, of
    rows that it may not read as well."""
    by_checkpoint: dict[str, list[str]] = {}
    latest = latest_checkpoint(Path(config.run_dir) / CHECKPOINTS)
    if latest is not None:
        check_same_tokenizer(latest, tokenizer)
    elif config.initial_checkpoint:
        start = find_checkpoint(config.initial_checkpoint, where="initial_checkpoint")
        doubts = tokenizer_doubts(
            start,
            tokenizer,
            allow_other=config.allow_other_tokenizer,
            switch="set allow_other_tokenizer",
        )
        doubts += length_doubts(start, config.student)
        by_checkpoint[str(start)] = [*_chosen(config.initial_checkpoint, start), *doubts]
    elif config.lora or config.training.trainable:
        drawn = (
            "the student's weights that do not learn are drawn at random; set initial_checkpoint"
        )
        by_checkpoint[config.run_dir] = [drawn]
    for name in teachers if config.distils else ():
        plan = TeacherPlan.of(config, name)
        if plan.config.ema_decay is not None:
            continue
        chosen = _chosen(plan.config.checkpoint, plan.checkpoint)
        doubts = teacher_doubts(plan, teachers[name].tokenizer)
        doubts += length_doubts(plan.checkpoint, plan.config.model)
        by_checkpoint.setdefault(str(plan.checkpoint), []).extend([*chosen, *doubts])
    return by_checkpoint


def _chosen(path: str, checkpoint: Path) -> list[str]:
    """A warning of the checkpoint that is taken, where the folder of a run is named."""
    if checkpoint.parent == Path(path) / CHECKPOINTS:
        return [f"the latest checkpoint of the run {path} is taken"]
    return []


def _check_targets(config: DistillConfig, inputs: Inputs) -> None:
    teachers = config.named_teachers.values() if config.distils else ()
    if any(teacher.cache is not None or teacher.is_remote for teacher in teachers):
        from megatron_ext.training.teachers.target_checks import check_caches, check_served

        check_caches(config, inputs)
        check_served(config, inputs)


def read_served_teacher(teacher: TeacherPlan) -> MegatronTokenizerText:
    """Check one teacher's section and read its tokenizer, for a process that serves it.

    Warnings go to standard error.

    Returns:
        The teacher's tokenizer.

    Raises:
        MegatronExtError: Anything that can be known to be wrong before the model is built.
    """
    check_teacher(teacher)
    tokenizer = read_tokenizer(teacher.config.tokenizer, f"{teacher.section}.tokenizer")
    doubts = teacher_doubts(teacher, tokenizer)
    doubts += length_doubts(teacher.checkpoint, teacher.config.model)
    write_warnings(f"{teacher.checkpoint}: {doubt}" for doubt in doubts)
    return tokenizer

"""``megatron-ext distill``: from a configuration to a trained student, on every rank."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from megatron_ext.atomic_file import write_text
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import ConfigError
from megatron_ext.losses import LOSS_REGISTRY, ProjectionShard
from megatron_ext.projection import SparseProjection
from megatron_ext.teachers import MegatronTeacher, Teacher
from megatron_ext.tokenizers import MegatronTokenizerText, build_tokenizer
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training import cpu_megatron
from megatron_ext.training.checkpoint import load_weights
from megatron_ext.training.config import DataConfig, DistillConfig, ModelConfig, TeacherConfig
from megatron_ext.training.corpus import read_documents
from megatron_ext.training.datasets import WindowDataset
from megatron_ext.training.forward_step import GlobalCounts, StudentStep
from megatron_ext.training.models import build_gpt_model, freeze
from megatron_ext.training.run_folder import (
    DATA_FILE,
    PROJECTION_FILE,
    config_values,
    open_run_folder,
)
from megatron_ext.training.student import Student
from megatron_ext.training.trainer import Trainer


def distill(config: DistillConfig) -> Path:
    """Train the student that ``config`` describes; call it on every rank, under torchrun or alone.

    Returns:
        The run's folder.

    Raises:
        MegatronExtError: Anything a user can mend, before the first step where it can be known.
    """
    if not torch.cuda.is_available():
        cpu_megatron.install()
    groups = process_groups.initialize(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
    )
    try:
        trainer = build_trainer(config, groups)
        trainer.train()
        return trainer.run_dir
    finally:
        process_groups.finalize()


def build_trainer(config: DistillConfig, groups: ProcessGroups) -> Trainer:
    """Read, check and build everything a run needs.

    Collectives: those of ``ProcessGroups.on_main`` and those that build and load models.
    """
    _check_batch(config, groups)
    _seed(config.training.seed)
    tokenizer = build_tokenizer(config.tokenizer)
    teacher_tokenizer = build_tokenizer(config.teacher.tokenizer) if config.teacher else None
    train_data = _dataset(config, config.data.train, tokenizer, teacher_tokenizer)
    validation_data = (
        _dataset(config, config.data.validation, tokenizer, teacher_tokenizer)
        if config.data.validation
        else None
    )
    run_dir = Path(config.run_dir)
    groups.on_main(lambda: open_run_folder(config))
    groups.on_main(lambda: _write_data_summary(run_dir, train_data, validation_data))
    student_size = _vocab_sizes(tokenizer, config.student, config)
    step = StudentStep(
        shard=groups.vocab_shard(vocab_size=student_size[0], padded_vocab_size=student_size[1]),
        next_token=LOSS_REGISTRY["next_token"](),
        distillation=None,
        projection=None,
        config=config.loss,
        counts=GlobalCounts(tokens=0, chunks=0),
    )
    teacher = None
    if config.distils and config.teacher and teacher_tokenizer:
        teacher, step = _with_teacher(
            config, config.teacher, tokenizer, teacher_tokenizer, step, run_dir, groups
        )
    gpt = build_gpt_model(
        config.student,
        padded_vocab_size=student_size[1],
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    if config.initial_checkpoint:
        load_weights(config.initial_checkpoint, gpt, fingerprint=tokenizer.fingerprint())
    return Trainer(
        config=config,
        groups=groups,
        run_dir=run_dir,
        student=Student(gpt, config=config, groups=groups),
        step=step,
        teacher=teacher,
        train_data=train_data,
        validation_data=validation_data,
        run_record={
            "config": config_values(config),
            "tokenizer_fingerprint": tokenizer.fingerprint(),
        },
    )


def _with_teacher(
    config: DistillConfig,
    teacher_config: TeacherConfig,
    tokenizer: MegatronTokenizerText,
    teacher_tokenizer: MegatronTokenizerText,
    step: StudentStep,
    run_dir: Path,
    groups: ProcessGroups,
) -> tuple[Teacher, StudentStep]:
    """The loaded teacher, and the forward step that learns from it."""
    vocab_size, padded_size = _vocab_sizes(teacher_tokenizer, teacher_config.model, config)
    shard = groups.vocab_shard(vocab_size=vocab_size, padded_vocab_size=padded_size)
    gpt = build_gpt_model(
        teacher_config.model,
        padded_vocab_size=padded_size,
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    load_weights(teacher_config.checkpoint, gpt, fingerprint=teacher_tokenizer.fingerprint())
    projection = _projection(config, tokenizer, teacher_tokenizer, run_dir, groups)
    return MegatronTeacher(freeze(gpt), shard=shard), StudentStep(
        shard=step.shard,
        next_token=step.next_token,
        distillation=LOSS_REGISTRY[config.loss.objective](temperature=config.loss.temperature),
        projection=ProjectionShard.from_projection(
            projection, student_shard=step.shard, teacher_shard=shard, device=groups.device
        )
        if groups.is_last_stage
        else None,
        config=config.loss,
        counts=step.counts,
    )


def _projection(
    config: DistillConfig,
    tokenizer: MegatronTokenizerText,
    teacher_tokenizer: MegatronTokenizerText,
    run_dir: Path,
    groups: ProcessGroups,
) -> SparseProjection:
    """The configured projection, or the run's own, built once by the main rank."""
    path = Path(config.projection) if config.projection else run_dir / PROJECTION_FILE
    if not config.projection:
        groups.on_main(lambda: _build_projection(path, tokenizer, teacher_tokenizer))
    return SparseProjection.load(path, student=tokenizer, teacher=teacher_tokenizer)


def _build_projection(
    path: Path, tokenizer: MegatronTokenizerText, teacher_tokenizer: MegatronTokenizerText
) -> None:
    if not path.exists():
        SparseProjection.from_tokenizers(tokenizer, teacher_tokenizer).save(path)


def _dataset(
    config: DistillConfig,
    paths: tuple[str, ...],
    tokenizer: MegatronTokenizerText,
    teacher_tokenizer: MegatronTokenizerText | None,
) -> WindowDataset:
    data: DataConfig = config.data
    return WindowDataset(
        read_documents(paths, text_key=data.text_key),
        student_tokenizer=tokenizer,
        student_length=config.student.seq_length,
        teacher_tokenizer=teacher_tokenizer,
        teacher_length=config.teacher.model.seq_length if config.teacher else None,
        append_eod=data.append_eod,
    )


def _write_data_summary(
    run_dir: Path, train_data: WindowDataset, validation_data: WindowDataset | None
) -> None:
    summary = {
        "train": train_data.summary(),
        "validation": validation_data.summary() if validation_data else None,
    }
    write_text(run_dir / DATA_FILE, json.dumps(summary, indent=2) + "\n")


def _vocab_sizes(
    tokenizer: MegatronTokenizerText, model: ModelConfig, config: DistillConfig
) -> tuple[int, int]:
    """Vocabulary size, and the same padded for the layout."""
    return tokenizer.vocab_size, padded_vocab_size(
        tokenizer.vocab_size,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
    )


def _check_batch(config: DistillConfig, groups: ProcessGroups) -> None:
    training = config.training
    step = training.micro_batch_size * groups.dp_size
    if training.global_batch_size % step:
        raise ConfigError(
            "global_batch_size does not divide into microbatches",
            got=training.global_batch_size,
            expected=(
                f"a multiple of {step} (micro_batch_size {training.micro_batch_size} x "
                f"{groups.dp_size} data-parallel replicas)"
            ),
        )


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

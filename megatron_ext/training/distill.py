"""``megatron-ext distill``: from a configuration to a trained student, on every rank."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from megatron_ext.alignment.coverage import ChunkCounts
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.losses import LOSS_REGISTRY, ProjectionShard
from megatron_ext.projection import SparseProjection
from megatron_ext.teachers import MegatronTeacher, Teacher
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training import cpu_megatron
from megatron_ext.training.checkpoint import load_weights
from megatron_ext.training.checkpoint_folder import find_checkpoint, latest_checkpoint
from megatron_ext.training.config import DistillConfig, ModelConfig, TeacherConfig
from megatron_ext.training.forward_step import GlobalCounts, StudentStep
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.models import build_gpt_model, freeze
from megatron_ext.training.run_folder import (
    CHECKPOINTS,
    PROJECTION_FILE,
    TOKENIZER_FOLDER,
    config_values,
    record_run,
)
from megatron_ext.training.student import Student
from megatron_ext.training.trainer import Trainer


def distill(config: DistillConfig, inputs: Inputs) -> Path:
    """Train the student that ``config`` describes; call it on every rank, under torchrun or alone.

    Args:
        config: The run.
        inputs: What ``read_inputs`` read for it.

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
    trainer = build_trainer(config, groups, inputs)
    trainer.train()
    # Only now: a rank that failed must not wait in the teardown for peers that wait for it.
    process_groups.finalize()
    return trainer.run_dir


def build_trainer(config: DistillConfig, groups: ProcessGroups, inputs: Inputs) -> Trainer:
    """Build and load everything a run needs; what it is goes to its folder once that has worked.

    Collectives: those of ``ProcessGroups.on_main`` and those that build and load models.
    """
    _seed(config.training.seed)
    tokenizer, run_dir = inputs.tokenizer, Path(config.run_dir)
    student_size = _vocab_sizes(tokenizer, config.student, config)
    step = StudentStep(
        shard=groups.vocab_shard(vocab_size=student_size[0], padded_vocab_size=student_size[1]),
        next_token=LOSS_REGISTRY["next_token"](),
        distillation=None,
        projection=None,
        config=config.loss,
        counts=GlobalCounts(tokens=0, chunk_counts=ChunkCounts()),
    )
    teacher = None
    if config.distils and config.teacher and inputs.teacher_tokenizer:
        teacher, step = _with_teacher(
            config, config.teacher, inputs, inputs.teacher_tokenizer, step, groups
        )
    gpt = build_gpt_model(
        config.student,
        padded_vocab_size=student_size[1],
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    if config.initial_checkpoint and latest_checkpoint(run_dir / CHECKPOINTS) is None:
        start = find_checkpoint(config.initial_checkpoint, where="initial_checkpoint")
        load_weights(start, gpt, fingerprint=tokenizer.fingerprint())
    student = Student(gpt, config=config, groups=groups)
    groups.on_main(lambda: record_run(config, inputs.data_summary()))
    groups.on_main(lambda: tokenizer.save_pretrained(run_dir / TOKENIZER_FOLDER, overwrite=True))
    return Trainer(
        config=config,
        groups=groups,
        run_dir=run_dir,
        student=student,
        step=step,
        teacher=teacher,
        train_data=inputs.train_data,
        validation_data=inputs.validation_data,
        run_record={
            "config": config_values(config),
            "tokenizer_fingerprint": tokenizer.fingerprint(),
        },
    )


def _with_teacher(
    config: DistillConfig,
    teacher_config: TeacherConfig,
    inputs: Inputs,
    tokenizer: MegatronTokenizerText,
    step: StudentStep,
    groups: ProcessGroups,
) -> tuple[Teacher, StudentStep]:
    """The loaded teacher, and the forward step that learns from it."""
    vocab_size, padded_size = _vocab_sizes(tokenizer, teacher_config.model, config)
    shard = groups.vocab_shard(vocab_size=vocab_size, padded_vocab_size=padded_size)
    gpt = build_gpt_model(
        teacher_config.model,
        padded_vocab_size=padded_size,
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    checkpoint = find_checkpoint(teacher_config.checkpoint, where="teacher.checkpoint")
    load_weights(checkpoint, gpt, fingerprint=tokenizer.fingerprint())
    projection = inputs.projection or _own_projection(
        Path(config.run_dir), inputs.tokenizer, tokenizer, groups
    )
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


def _own_projection(
    run_dir: Path,
    tokenizer: MegatronTokenizerText,
    teacher_tokenizer: MegatronTokenizerText,
    groups: ProcessGroups,
) -> SparseProjection:
    """The run's own projection, built once by the main rank.

    One that a start without a checkpoint left is built again: it may be of another pair.
    """
    path = run_dir / PROJECTION_FILE

    def build() -> None:
        is_resumed = latest_checkpoint(run_dir / CHECKPOINTS) is not None
        if not (is_resumed and path.exists()):
            run_dir.mkdir(parents=True, exist_ok=True)
            SparseProjection.from_tokenizers(tokenizer, teacher_tokenizer).save(path)

    groups.on_main(build)
    return SparseProjection.load(path, student=tokenizer, teacher=teacher_tokenizer)


def _vocab_sizes(
    tokenizer: MegatronTokenizerText, model: ModelConfig, config: DistillConfig
) -> tuple[int, int]:
    """Vocabulary size, and the same padded for the layout."""
    return tokenizer.vocab_size, padded_vocab_size(
        tokenizer.vocab_size,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
    )


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

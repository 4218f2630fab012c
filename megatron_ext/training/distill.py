"""``megatron-ext distill``: from a configuration to a trained student, on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.huggingface.side_files import SIDE_FOLDER, copy_side_files
from megatron_ext.losses import LOSS_REGISTRY
from megatron_ext.losses.checks.shard_check import check_shards_agree
from megatron_ext.teachers import Teacher
from megatron_ext.teachers.megatron_teacher import MegatronTeacher
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training import cpu_megatron, rank_phase
from megatron_ext.training.checkpoint_folder import find_checkpoint, latest_checkpoint
from megatron_ext.training.config import TEACHER, DistillConfig, ModelConfig
from megatron_ext.training.data.global_batches import Replica
from megatron_ext.training.first_weights import load_first_weights
from megatron_ext.training.forward_step import StudentStep
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.learning_step import TaughtBy, learning_step, run_projection
from megatron_ext.training.models import build_model_chunks, freeze
from megatron_ext.training.run_folder import (
    CHECKPOINTS,
    TOKENIZER_FOLDER,
    config_values,
    record_run,
)
from megatron_ext.training.start_agreement import check_same_start
from megatron_ext.training.student import Student
from megatron_ext.training.teacher_cache.cached_teacher import CachedTeacher
from megatron_ext.training.teacher_cache.opening import open_cached_teacher
from megatron_ext.training.term_weighting import make_weighting
from megatron_ext.training.trainer import Trainer
from megatron_ext.training.vocabulary_layout import lay_out
from megatron_ext.training.watchdog import GRACE, Watchdog


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
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    process_groups.join(timeout + GRACE)
    with Watchdog(timeout):
        trainer = _start(config, inputs, timeout + GRACE)
        trainer.train()
    # Only now: a rank that failed must not wait in the teardown for peers that wait for it.
    process_groups.finalize()
    return trainer.run_dir


def _start(config: DistillConfig, inputs: Inputs, timeout: timedelta) -> Trainer:
    """The trainer in its layout, once all ranks are known to be about to do the same."""
    check_same_start(config, inputs)
    groups = process_groups.initialize(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.parallel.context_parallel_size,
        timeout=timeout,
    )
    rank_phase.enter("building the models")
    return build_trainer(config, groups, inputs)


def build_trainer(config: DistillConfig, groups: ProcessGroups, inputs: Inputs) -> Trainer:
    """Build and load everything a run needs; what it is goes to its folder once that has worked.

    Collectives: those of ``ProcessGroups.on_main``, of ``check_shards_agree``, those that build
    and load models, and with a vocabulary layout one all-to-all for each model's head.
    """
    _seed(config.training.seed)
    tokenizer, run_dir = inputs.tokenizer, Path(config.run_dir)
    chunks, shard = _model("student", config.student, tokenizer, config, groups)
    if config.initial_checkpoint and latest_checkpoint(run_dir / CHECKPOINTS) is None:
        start = find_checkpoint(config.initial_checkpoint, where="initial_checkpoint")
        load_first_weights(start, chunks, config.student, tokenizer)
        groups.on_main(lambda: copy_side_files(start, run_dir / SIDE_FOLDER))
    return teach(chunks, shard, config=config, groups=groups, inputs=inputs, make_student=Student)


def teach(
    chunks: list[GPTModel],
    shard: VocabShard,
    *,
    config: DistillConfig,
    groups: ProcessGroups,
    inputs: Inputs,
    make_student: Callable[..., Student],
) -> Trainer:
    """Everything a run needs around a student that holds its first weights and is not wrapped yet.

    Args:
        shard: This rank's columns of the student's vocabulary.
        make_student: ``Student``, or one that leaves the update to another loop.

    Collectives: those of ``build_trainer`` but for the student's own.
    """
    tokenizer, run_dir = inputs.tokenizer, Path(config.run_dir)
    laid_out = None
    step = StudentStep(shard=shard, next_token=LOSS_REGISTRY["next_token"]())
    teachers: dict[str, Teacher] = {}
    cached_teachers: dict[str, CachedTeacher] = {}
    taught_by = []
    for name in config.named_teachers if config.distils else ():
        if config.named_teachers[name].cache is not None:
            teacher_shard = teacher_vocab_shard(config, name, inputs, groups)
            cached_teachers[name] = open_cached_teacher(
                config, name, shard=teacher_shard, groups=groups
            )
            projection = run_projection(config, inputs, name, groups)
            taught_by.append(TaughtBy(name, None, teacher_shard, projection, None))
            continue
        teacher_chunks, teacher_shard = frozen_teacher(config, name, inputs, groups)
        teachers[name] = MegatronTeacher(teacher_chunks, shard=teacher_shard)
        # After the model, which may not load: a projection of the run's own is its first file.
        projection = run_projection(config, inputs, name, groups)
        if config.training.vocabulary_layout == "co_sharded":
            assert projection is not None, "checked with the objective"
            laid_out = lay_out(
                config,
                projection,
                student=chunks,
                teacher=teacher_chunks,
                shards=(shard, teacher_shard),
                groups=groups,
            )
        layout = laid_out and laid_out.layout
        taught_by.append(TaughtBy(name, teacher_chunks[-1], teacher_shard, projection, layout))
    step = learning_step(
        step, taught_by, student=chunks[-1], config=config, inputs=inputs, groups=groups
    )
    # Behind the step: an objective may have parameters of its own, which are trained with these.
    student = make_student(chunks, config=config, rows=laid_out and laid_out.student_rows)
    replica = Replica(groups.dp_rank, groups.dp_size, config.training.micro_batch_size)
    groups.on_main(lambda: record_run(config, inputs.data.summary()))
    groups.on_main(lambda: tokenizer.save_pretrained(run_dir / TOKENIZER_FOLDER, overwrite=True))
    return Trainer(
        config=config,
        groups=groups,
        run_dir=run_dir,
        student=student,
        step=step,
        teachers=teachers,
        cached_teachers=cached_teachers,
        weighting=make_weighting(config),
        data=inputs.data,
        replica=replica,
        batches=inputs.data.batches(replica),
        places=laid_out and laid_out.places,
        run_record={
            "config": config_values(config),
            "tokenizer_fingerprint": tokenizer.fingerprint(),
        },
    )


def frozen_teacher(
    config: DistillConfig, name: str, inputs: Inputs, groups: ProcessGroups
) -> tuple[list[GPTModel], VocabShard]:
    """A loaded teacher, frozen, and this rank's columns of its vocabulary."""
    teacher, tokenizer = config.named_teachers[name], inputs.teachers[name].tokenizer
    chunks, shard = _model(_side(name), teacher.model, tokenizer, config, groups)
    where = f"{config.section_of(name)}.checkpoint"
    checkpoint = find_checkpoint(teacher.checkpoint, where=where)
    load_first_weights(checkpoint, chunks, teacher.model, tokenizer)
    return freeze(chunks), shard


def teacher_vocab_shard(
    config: DistillConfig, name: str, inputs: Inputs, groups: ProcessGroups
) -> VocabShard:
    """This rank's columns of a teacher's vocabulary, without its model."""
    teacher, tokenizer = config.named_teachers[name], inputs.teachers[name].tokenizer
    return model_shard(_side(name), teacher.model, tokenizer, config, groups)


def _side(name: str) -> str:
    return name if name == TEACHER else f"teacher {name}"


def _model(
    side: str,
    model: ModelConfig,
    tokenizer: MegatronTokenizerText,
    config: DistillConfig,
    groups: ProcessGroups,
) -> tuple[list[GPTModel], VocabShard]:
    """This rank's part with its first weights, and its columns of the vocabulary."""
    shard = model_shard(side, model, tokenizer, config, groups)
    chunks = build_model_chunks(
        model,
        padded_vocab_size=shard.width * config.parallel.tensor_model_parallel_size,
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    return chunks, shard


def model_shard(
    side: str,
    model: ModelConfig,
    tokenizer: MegatronTokenizerText,
    config: DistillConfig,
    groups: ProcessGroups,
) -> VocabShard:
    """This rank's columns of a model's vocabulary.

    Collectives: those of ``check_shards_agree``.
    """
    padded_size = padded_vocab_size(
        model.padded_ids(tokenizer.vocab_size),
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
    )
    shard = groups.vocab_shard(vocab_size=tokenizer.vocab_size, padded_vocab_size=padded_size)
    check_shards_agree(shard, side=side, device=groups.device)
    return shard


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

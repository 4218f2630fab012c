"""The training run of ``megatron-ext distill``, from a configuration to a trained student."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.data.global_batches import Replica
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.engines.engine import Engine
from megatron_ext.errors import ConfigError
from megatron_ext.huggingface.checkpoint_files import SIDE_FOLDER, copy_side_files, generation_stops
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training import watchdog
from megatron_ext.training.checkpoints.folder import find_checkpoint, latest_checkpoint
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.faults import StopRequest, log_left_out
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.learning_step import learning_step
from megatron_ext.training.megatron_models.first_weights import (
    load_first_weights,
    student_vocab_shard,
)
from megatron_ext.training.megatron_models.learning_parts import add_adapters, freeze_parts
from megatron_ext.training.megatron_models.megatron_parts import check_torch
from megatron_ext.training.megatron_models.models import build_model_chunks
from megatron_ext.training.rollouts import Rollouts
from megatron_ext.training.run_folder import (
    CHECKPOINTS,
    TOKENIZER_FOLDER,
    disown_run_folder,
    own_run_folder,
    record_run,
)
from megatron_ext.training.run_loss import make_weighting, with_linear_form, with_vocabulary_layout
from megatron_ext.training.run_plan import RunPlan
from megatron_ext.training.start_agreement import check_same_start
from megatron_ext.training.student import Student
from megatron_ext.training.teachers.live_teacher import StudentParts
from megatron_ext.training.teachers.run_teachers import make_run_teachers
from megatron_ext.training.trainer import Measurement, Trainer
from megatron_ext.training.watchdog import watched_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentToEvaluate:
    """A student between two steps."""

    chunk: GPTModel
    """This rank's part, not wrapped, as it trains."""

    shard: VocabShard
    tokenizer: MegatronTokenizerText
    groups: ProcessGroups

    max_length: int
    """Longest sequence, in tokens."""

    stops: frozenset[int] = frozenset()
    """Ids that end a text besides those of the tokenizer."""


EngineOf = Callable[[StudentToEvaluate], Engine]
"""Makes the engine of a run's rollouts."""


class Evaluator(Protocol):
    """Measures a student between steps; it leaves weights, modes and random states as they were."""

    def __call__(self, student: StudentToEvaluate) -> dict[str, float]:
        """``eval/TASK/METRIC``, the same on every rank; all ranks call it together."""


def measurement(
    trainer: Trainer, evaluator: Evaluator | None, tokenizer: MegatronTokenizerText
) -> Measurement | None:
    """The measurement of the student by the tasks of its configuration; None without tasks.

    Args:
        tokenizer: The student's.

    Raises:
        ConfigError: There are tasks, but no evaluator.
    """
    if not trainer.plan.evaluation.tasks:
        return None
    if evaluator is None:
        raise ConfigError(
            "there is no evaluator for the tasks of this run",
            where="evaluation.tasks",
            got=", ".join(trainer.plan.evaluation.tasks),
            expected="an evaluator, such as that of megatron-ext distill",
            fix="pass one to distill, or remove the tasks",
        )
    return partial(evaluator, _between_steps(trainer, tokenizer))


def rollouts_of(
    trainer: Trainer, engine_of: EngineOf | None, tokenizer: MegatronTokenizerText
) -> Rollouts | None:
    """The rollouts of a run; None where it has none.

    Args:
        tokenizer: The student's.

    Raises:
        ConfigError: There are rollouts, but no engine.
    """
    texts, rollouts = trainer.data.texts, trainer.plan.data.rollouts
    if texts is None or rollouts is None:
        return None
    if engine_of is None:
        raise ConfigError(
            "there is no engine for the rollouts of this run",
            where="data.rollouts",
            expected="an engine, such as that of megatron-ext distill",
            fix="pass one to distill, or remove the section",
        )
    return Rollouts(
        engine=engine_of(_between_steps(trainer, tokenizer)),
        texts=texts,
        groups=trainer.groups,
        ahead=rollouts.steps_ahead,
        update_interval=trainer.plan.training.save_interval,
        run_dir=trainer.run_dir,
    )


def _between_steps(trainer: Trainer, tokenizer: MegatronTokenizerText) -> StudentToEvaluate:
    return StudentToEvaluate(
        chunk=trainer.student.chunks[-1],
        shard=trainer.step.shard,
        tokenizer=tokenizer,
        groups=trainer.groups,
        max_length=trainer.plan.student.seq_length,
        stops=generation_stops(trainer.run_dir),
    )


def distill(
    config: DistillConfig,
    inputs: Inputs,
    *,
    evaluator: Evaluator | None = None,
    engine_of: EngineOf | None = None,
) -> Path:
    """Train the student that ``config`` describes; call it on every rank, under torchrun or alone.

    Args:
        inputs: The result of ``read_inputs`` for it.
        evaluator: Runs the tasks of ``config.evaluation``, where it has any.
        engine_of: Makes the engine of ``config.data.rollouts``, where there are any.

    Returns:
        The run's folder.

    Raises:
        MegatronExtError: Anything a user can mend, before the first step where it can be known.
    """
    with watched_launch(config.parallel.distributed_timeout_minutes) as timeout:
        try:
            check_same_start(config, inputs)
            groups = process_groups.initialize(config.parallel.layout, timeout=timeout)
            watchdog.enter("building the models")
            trainer = build_trainer(config, groups, inputs)
            trainer.rollouts = rollouts_of(trainer, engine_of, inputs.tokenizer)
        except BaseException:
            disown_run_folder(Path(config.run_dir))
            raise
        with StopRequest(process_groups.launch_place().store) as trainer.stop:
            trainer.train(measurement(trainer, evaluator, inputs.tokenizer))
    return trainer.run_dir


def build_trainer(config: DistillConfig, groups: ProcessGroups, inputs: Inputs) -> Trainer:
    """Build and load everything a run needs, and then record the run in its folder.

    Collectives: those of ``ProcessGroups.on_main``, of ``check_shards_agree``, those that build
    and load models, and with a vocabulary layout one all-to-all for each model's head.
    """
    seed = config.training.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tokenizer, run_dir = inputs.tokenizer, Path(config.run_dir)
    groups.on_main(lambda: own_run_folder(run_dir))
    is_resumed = latest_checkpoint(run_dir / CHECKPOINTS) is not None
    shard = student_vocab_shard(config.student, tokenizer, groups, config.parallel.layout)
    chunks = build_model_chunks(
        config.student,
        padded_vocab_size=shard.width * config.parallel.tensor_model_parallel_size,
        parallel=config.parallel,
        training=config.training,
        groups=groups,
        is_loaded=is_resumed or bool(config.initial_checkpoint),
        has_adapters=config.lora is not None,
    )
    if config.initial_checkpoint and not is_resumed:
        start = find_checkpoint(config.initial_checkpoint, where="initial_checkpoint")
        load_first_weights(start, chunks, config.student, verify=config.training.verify_checkpoints)
        groups.on_main(lambda: copy_side_files(start, run_dir / SIDE_FOLDER))
    if config.lora is not None:
        add_adapters(chunks, config.lora, seed=seed)
    freeze_parts(chunks, config.training.trainable)
    return build_trainer_around(
        chunks, shard, config=config, groups=groups, inputs=inputs, make_student=Student
    )


def build_trainer_around(
    chunks: list[GPTModel],
    shard: VocabShard,
    *,
    config: DistillConfig,
    groups: ProcessGroups,
    inputs: Inputs,
    make_student: Callable[..., Student],
) -> Trainer:
    """The trainer of a student that holds its first weights and is not wrapped yet.

    Args:
        shard: This rank's columns of the student's vocabulary.
        make_student: ``Student``, or one that leaves the update to another loop, which scales
            losses.

    Collectives: those of ``build_trainer`` but for the student's own.
    """
    check_torch()
    on_gpu, tokenizer = groups.device.type == "cuda", inputs.tokenizer
    config = with_vocabulary_layout(config, on_gpu=on_gpu)
    config = with_linear_form(config, on_gpu=on_gpu, vocab_size=tokenizer.vocab_size)
    run = RunPlan.of(config)
    parts = StudentParts(plan=run, inputs=inputs, groups=groups, chunks=chunks, shard=shard)
    teachers = make_run_teachers(parts)
    laid_out = next((loaded.laid_out for loaded in teachers.values() if loaded.laid_out), None)
    step = learning_step(parts, list(teachers.values()), scales_losses=make_student is not Student)
    # After the step: an objective may have added parameters of its own to the student.
    averages = [loaded.average for loaded in teachers.values() if loaded.average]
    student = make_student(chunks, run, rows=laid_out and laid_out.student_rows, averages=averages)
    replica = Replica(groups.dp_rank, groups.dp_size, run.training.micro_batch_size)
    groups.on_main(lambda: record_run(config, inputs.data.summary()))
    groups.on_main(lambda: log_left_out(run.run_dir, inputs.data.left_out()))
    groups.on_main(
        lambda: tokenizer.save_pretrained(run.run_dir / TOKENIZER_FOLDER, overwrite=True)
    )
    return Trainer(
        plan=run,
        groups=groups,
        student=student,
        step=step,
        teachers={name: made.teacher for name, made in teachers.items() if made.teacher},
        cached_teachers={name: made.cached for name, made in teachers.items() if made.cached},
        weighting=make_weighting(run.loss, train_iters=run.training.train_iters),
        data=inputs.data,
        replica=replica,
        batches=inputs.data.batches(replica),
        places=laid_out and laid_out.places,
        run_record={
            "config": run.values,
            "tokenizer_fingerprint": tokenizer.fingerprint(),
        },
    )

"""What spawned ranks run in the training tests."""

import random
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.errors import MegatronExtError
from megatron_ext.teachers.megatron_teacher import MegatronTeacher
from megatron_ext.training import forward_step
from megatron_ext.training.checkpoints.checkpoint import save_checkpoint
from megatron_ext.training.checkpoints.folder import checkpoint_path, set_latest_checkpoint
from megatron_ext.training.checkpoints.saved_run import SavedRun
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.distill import build_trainer
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.models import build_gpt_model, sharded_weights
from megatron_ext.training.metrics import read_metrics
from tests.training.added_objective import register
from tests.training.once import once
from tests.training.tiny_run import (
    ITERATIONS,
    changed,
    checkpoints,
    objective_run,
    student_run,
    teacher_run,
)


def train_alone(rank, folder):
    """A teacher, the student's first weights, and the unsharded run that others are compared to."""
    _train_teacher(folder)
    train_layouts(rank, folder, [("alone", {})])


def _train_teacher(folder):
    """A teacher, and the student's first weights as a checkpoint."""
    _trainer(teacher_run(folder)).train()
    save_start(student_run(folder, "start"))


def save_start(config):
    """The first weights of a run, as a checkpoint of its."""
    trainer = _trainer(config)
    save_checkpoint(
        Path(config.run_dir) / "checkpoints",
        0,
        {**sharded_weights(trainer.student.chunks), "run": trainer.run_record},
        groups=trainer.groups,
        keep=1,
    )


def go_back(rank, folder, name, iteration, *, of=None):
    """Let a run, or a copy of the run ``of``, go on from the checkpoint of an iteration."""
    if rank == 0:
        if of is not None:
            shutil.copytree(folder / of, folder / name)
        set_latest_checkpoint(checkpoint_path(folder / name / "checkpoints", iteration), keep=2)
    dist.barrier()


def train_layouts(rank, folder, layouts, kept=()):
    """One run per layout, one after the other, all from the same first weights.

    Args:
        kept: Names of runs that save after each step, not behind the last alone.
    """
    for name, parallel in layouts:
        config = changed(
            student_run(folder, name, **parallel),
            initial_checkpoint=checkpoints(folder, "start"),
            training={"save_interval": 1 if name in kept else ITERATIONS},
        )
        _trainer(config).train()


SAVED = ("next_token", "dskd", "gold")
"""Objectives whose runs are read again; only ``dskd`` saves more than the student."""


def train_objectives(rank, folder, runs, one_step=()):
    """Two steps by an objective under a layout each, from the same first weights and teacher.

    Args:
        one_step: Names of runs that end behind the first.
    """
    register()
    if not (folder / "teacher").exists():
        _train_teacher(folder)
    for name, (objective, options), parallel in runs:
        loss = LossConfig(objective=objective, options=options, ce_weight=0.5)
        if name.startswith("alm-linear"):
            loss = replace(loss, linear=True, linear_tile_rows=24)
        config = objective_run(folder, name, loss, **parallel)
        if name in one_step:
            config = changed(config, training={"train_iters": 1, "save_interval": 1})
        with nullcontext() if objective in SAVED else patch.object(SavedRun, "save"):
            _trainer(config).train()


def train_with_broken_teacher(rank, folder, parallel, objective="mined"):
    """The error of a run whose teacher predicts NaN, and how often its logits were read for it."""
    config = objective_run(folder, "broken", LossConfig(objective=objective), **parallel)
    trainer = _trainer(config)
    if trainer.groups.is_last_stage:
        assert isinstance(trainer.teachers["teacher"], MegatronTeacher)
        with torch.no_grad():
            trainer.teachers["teacher"].chunks[-1].decoder.final_layernorm.weight[0] = torch.nan
    with patch.object(forward_step, "check_finite", wraps=forward_step.check_finite) as reads:
        return error_of(trainer.train), reads.call_count


def error_of(begin):
    """Kind and text of the error that ends it; None: it ends well."""
    try:
        begin()
    except MegatronExtError as error:
        return f"{type(error).__name__}: {error}"
    return None


def train_unsaved(trainer):
    """Metrics of a run that leaves no checkpoint."""
    with patch.object(SavedRun, "save"):
        trainer.train()
    dist.barrier()
    return read_metrics(Path(trainer.run_dir))


def resume_dskd_in_bf16(rank, folder):
    """Metrics of a run by ``dskd``, whole and with its last step done again."""
    config = objective_run(
        folder, "dskd-bf16", LossConfig(objective="dskd"), use_distributed_optimizer=True
    )
    config = changed(config, training={"precision": "bf16", "save_interval": 1})
    _trainer(config).train()
    whole = read_metrics(Path(config.run_dir))
    go_back(rank, folder, "dskd-bf16", 1)
    _trainer(config).train()
    return whole, read_metrics(Path(config.run_dir))


def repeat_last_iteration(rank, folder, name, parallel):
    """Resume a finished run from the checkpoint before its last one."""
    go_back(rank, folder, name, ITERATIONS - 1)
    train_layouts(rank, folder, [(name, parallel)], [name])


def go_on(rank, folder, layouts):
    """One run, stretch by stretch: up to an iteration, under a layout; what each stretch saw."""
    return [_stretch(folder, iterations, parallel) for iterations, parallel in layouts]


def _stretch(folder, iterations, parallel):
    config = changed(
        student_run(folder, "run", **parallel),
        teacher=None,
        loss=LossConfig(objective="next_token"),
        training={"train_iters": iterations},
        # Of the iterations trained by then; the schedule would follow their number.
        optimizer={"lr_decay_style": "constant"},
    )
    trainer = _trainer(config)
    done = trainer._saved().load()
    found = {"done": done, "loaded": _held_out(trainer), "numbers": _numbers()}
    # It loads once more, the numbers drawn included.
    trainer.train()
    return found | {"trained": _held_out(trainer), "next_numbers": _numbers()}


def _held_out(trainer):
    return trainer._validate(trainer.data.held_out).student


def _numbers():
    """The next number of each generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def first_layer(rank, folder):
    """What this rank's stage draws for its first layer under two pipeline stages."""
    config = student_run(folder, "stages", pipeline_model_parallel_size=2)
    gpt = build_gpt_model(
        config.student,
        padded_vocab_size=64,
        parallel=config.parallel,
        training=config.training,
        groups=fresh_groups(config.parallel.layout),
    )
    return gpt.decoder.layers[0].mlp.linear_fc1.weight.detach()


def _trainer(config):
    """A trainer in a fresh layout over the ranks that are there."""
    groups, inputs = read_afresh(config)
    # To draw a run takes longer than a step of it; tests/cli/test_resume.py looks for the picture.
    patch("megatron_ext.training.metrics.plot_loss_curve").start()
    with once():
        return build_trainer(config, groups, inputs)


def fresh_groups(layout):
    """A layout over the ranks that are there, in the place of any other."""
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    return process_groups.initialize(layout)


def read_afresh(config):
    """The groups of a fresh layout, and the inputs of a run."""
    groups = fresh_groups(config.parallel.layout)
    with once():
        return groups, read_inputs(config, world_size=dist.get_world_size())

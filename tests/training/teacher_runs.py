"""What spawned ranks run in the tests of several teachers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_ext.training.checkpoint_folder import checkpoint_path, set_latest_checkpoint
from megatron_ext.training.config import LossConfig, TeacherConfig
from tests.training.rank_functions import _train_teacher, _trainer
from tests.training.tiny_run import objective_run, student_run

ITERATIONS = 2


class Run(NamedTuple):
    """Two steps of a student from its first weights."""

    name: str

    teachers: Mapping[str, Mapping[str, Any]] | None = None
    """By name what differs from ``other`` or, called ``own...``, from ``own``; None: the one
    ``teacher``."""

    loss: Mapping[str, Any] | None = None

    parallel: Mapping[str, Any] | None = None

    is_measured: bool = False
    """On held-out text, at the end."""

    is_kept: bool = False
    """Each step's checkpoint, and not the last one's alone."""

    goes_on: bool = False
    """Do the last step of the run of this name again."""


def config_of(folder, run):
    """``other`` has another tokenizer, ``own`` the student's; both have trained for one step."""
    loss = LossConfig(**{"ce_weight": 0.5, **(run.loss or {})})
    # Another objective than vocab_kl, for which objective_run has a teacher of its own.
    config = objective_run(folder, run.name, dataclasses.replace(loss, objective="alm"))
    assert config.teacher is not None
    config = dataclasses.replace(
        config,
        loss=loss,
        parallel=dataclasses.replace(config.parallel, **(run.parallel or {})),
        data=student_run(folder, run.name).data if run.is_measured else config.data,
        training=dataclasses.replace(
            config.training, train_iters=ITERATIONS, save_interval=1 if run.is_kept else ITERATIONS
        ),
    )
    if run.teachers is None:
        return config
    other, own = config.teacher, _own(config, folder)
    assert other is not None
    teachers = {
        name: dataclasses.replace(own if name.startswith("own") else other, **changes)
        for name, changes in run.teachers.items()
    }
    return dataclasses.replace(config, teacher=None, teachers=teachers)


def train_teachers(rank, folder, runs):
    """Both teachers, the student's first weights, and the runs."""
    _train_teacher(folder)
    config = student_run(folder, "own")
    _trainer(
        dataclasses.replace(
            config,
            teacher=None,
            loss=LossConfig(objective="next_token"),
            data=dataclasses.replace(config.data, validation=()),
            training=dataclasses.replace(config.training, train_iters=1, seed=7),
        )
    ).train()
    train_runs(rank, folder, runs)


def train_runs(rank, folder, runs):
    """One after the other."""
    for run in runs:
        if run.goes_on:
            if rank == 0:
                checkpoints = folder / run.name / "checkpoints"
                set_latest_checkpoint(checkpoint_path(checkpoints, ITERATIONS - 1), keep=2)
            dist.barrier()
        _trainer(config_of(folder, run)).train()


def _own(config, folder):
    return TeacherConfig(
        tokenizer=config.tokenizer,
        model=config.student,
        checkpoint=str(folder / "own" / "checkpoints"),
    )

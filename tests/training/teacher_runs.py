"""What spawned ranks run in the tests of several teachers, and of teachers in different places."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_ext.engines.engine import EngineConfig
from megatron_ext.training.configuration.config import LossConfig
from tests.training.rank_functions import _train_teacher, _trainer, go_back, train_unsaved
from tests.training.tiny_run import (
    ITERATIONS,
    changed,
    checkpoints,
    objective_run,
    same_tokenizer_teacher,
    student_run,
)


class Run(NamedTuple):
    """Two steps of a student from its first weights."""

    name: str
    teachers: Mapping[str, Mapping[str, Any]] | None = None
    """By name what differs from ``other`` or, called ``own...``, from ``own``; None: the one
    ``teacher``."""

    loss: Mapping[str, Any] = {}
    parallel: Mapping[str, Any] = {}
    is_measured: bool = False
    """On held-out text, at the end."""

    is_kept: bool = False
    """Each step's checkpoint, and not the last one's alone."""

    goes_on: bool = False
    """Do the last step of the run of this name again."""


def config_of(folder, run):
    """``other`` has another tokenizer, ``own`` the student's; both have trained for one step."""
    config = changed(
        student_run(folder, run.name, **run.parallel),
        loss=LossConfig(**{"ce_weight": 0.5, **run.loss}),
        training={"save_interval": 1 if run.is_kept else ITERATIONS},
        data={} if run.is_measured else {"validation": ()},
        initial_checkpoint=checkpoints(folder, "start"),
    )
    return config if run.teachers is None else _taught(config, folder, run.teachers)


def train_teachers(rank, folder, runs):
    """Both teachers, the student's first weights, and the runs."""
    _train_teacher(folder)
    own = changed(
        student_run(folder, "own"),
        teacher=None,
        loss=LossConfig(objective="next_token"),
        data={"validation": ()},
        training={"train_iters": 1, "seed": 7},
    )
    _trainer(own).train()
    train_runs(rank, folder, runs)


def train_runs(rank, folder, runs):
    for run in runs:
        if run.goes_on:
            go_back(rank, folder, run.name, ITERATIONS - 1)
        _trainer(config_of(folder, run)).train()


def elsewhere_run(folder, name, teachers, *, iterations=ITERATIONS, loss=None, **parallel):
    """A run from the first weights in ``folder``, with teachers of one checkpoint."""
    loss = loss or LossConfig(temperature=1.5, ce_weight=0.5)
    config = changed(
        objective_run(folder, name, loss, **{"distributed_timeout_minutes": 2} | parallel),
        # So that the first steps of a run are the same however many follow.
        optimizer={"lr_decay_style": "constant"},
        training={"train_iters": iterations, "save_interval": 1000},
    )
    return _taught(config, folder, teachers)


def train_beside(rank, folder, runs):
    """A teacher, first weights, and runs with all teachers on the student's ranks."""
    _train_teacher(folder)
    for name, (teachers, loss) in runs.items():
        train_unsaved(_trainer(elsewhere_run(folder, name, teachers, loss=loss)))


def train_by_engines(rank, folder, url, runs):
    """Runs, each by the kind of the engine at ``url``, objective, form of targets and layout."""
    for name, (kind, objective, form, parallel) in runs.items():
        engine = EngineConfig(kind=kind, url=(url,))
        of_engine = {"placement": "engine", "engine": engine, "serving": form}
        teacher = of_engine | {"checkpoint": checkpoints(folder, "start")}
        config = elsewhere_run(folder, name, {"own": teacher}, loss=objective, **parallel)
        held_out = {"validation": (str(folder / "held-out.jsonl"),)}
        train_unsaved(_trainer(changed(config, data=held_out)))


def _taught(config, folder, teachers):
    own = same_tokenizer_teacher(folder, "own")
    taught = {
        name: changed(own if name.startswith("own") else config.teacher, **fields)
        for name, fields in teachers.items()
    }
    return replace(config, teacher=None, teachers=taught)

"""What spawned ranks run in the tests of cached teachers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.errors import MegatronExtError
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers.formed_targets import FormedTargets
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training import cpu_megatron
from megatron_ext.training.config import LossConfig
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.saved_run import SavedRun
from megatron_ext.training.teachers.block_recorder import BlockRecorder
from megatron_ext.training.teachers.recording import Recording, record, recording_config
from tests.training.rank_functions import _tokenizer, _train_teacher, _trainer
from tests.training.tiny_run import TEACHER_PIECES, objective_run

FILE_BYTES = 1 << 12
"""So that the tiny corpus is several files."""


class CachedRun(NamedTuple):
    """Two steps of a student from its first weights."""

    name: str
    objective: str
    options: Mapping[str, Any]
    cache: str | None
    """Folder of the cache; None: the teacher itself."""

    parallel: Mapping[str, Any] = {}
    micro_batch_size: int = 2

    form: TargetForm | None = None
    """What the live teacher's targets are made into."""


class FormedTeacher:
    """A live teacher that hands out what a cache would keep, without rounding."""

    def __init__(self, teacher, form):
        self._teacher, self._formed = teacher, FormedTargets(form=form)

    def targets(self, microbatches):
        return [
            TeacherTargets(kind="topk", shard=targets.shard, **self._formed(targets, batch.labels))
            for targets, batch in zip(
                self._teacher.targets(microbatches), microbatches, strict=True
            )
        ]


def form_of(kind, precision=None, top_k=0):
    """Of the tiny run's teacher, but for the exact size of its vocabulary."""
    return TargetForm.of(
        kind, precision=precision, top_k=top_k, hidden_size=48, vocab_size=TEACHER_PIECES
    )


def cache_and_train(rank, folder, caches, runs, foreign):
    """A teacher, the student's first weights, caches under layouts, and runs.

    Returns:
        Metrics by run, the files of the cache ``halted`` when it was stopped, and the error of
        ``foreign``, whose teacher has other weights than the cache's.
    """
    _train_teacher(folder)
    for name, form, parallel in caches:
        record_cache(folder, name, form, **parallel)
    name, form, parallel = caches[0]
    with suppress(KeyboardInterrupt):
        record_cache(folder, "halted", form, stop_after=1, tensor_model_parallel_size=2)
    dist.barrier()
    halted = len(list((folder / "halted").glob("targets-*")))
    (folder / "halted" / ".targets-00-000001.bin.1-00").touch()
    dist.barrier()
    record_cache(folder, "halted", form, **parallel)
    return train_cached(folder, runs), halted, _error_of(folder, foreign)


def train_cached(folder, runs):
    """Metrics of runs, one after the other."""
    metrics = {}
    for run in runs:
        trainer = _trainer(config_of(folder, run))
        if run.form is not None:
            live = {name: FormedTeacher(its, run.form) for name, its in trainer.teachers.items()}
            trainer = dataclasses.replace(trainer, teachers=live)
        assert bool(trainer.teachers) == (run.cache is None)
        with patch.object(SavedRun, "save"):
            trainer.train()
        dist.barrier()
        metrics[run.name] = read_metrics(Path(trainer.run_dir))
    return metrics


def record_cache(folder, name, form, *, stop_after=None, **parallel):
    """A cache in ``folder / name``; ``stop_after`` so many files it ends as if it were killed."""
    config = recording_config(
        config_of(folder, CachedRun(name, "alm", {}, None, parallel)),
        folder / name,
        world_size=dist.get_world_size(),
    )
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    groups = process_groups.initialize(config.parallel.layout)
    with patch("megatron_ext.training.run_tokenizer.build_tokenizer", _tokenizer):
        inputs = read_inputs(config, world_size=dist.get_world_size())
    vocab_size = inputs.teachers["teacher"].tokenizer.vocab_size
    form = dataclasses.replace(form, vocab_size=vocab_size)
    recording = Recording(teacher="teacher", form=form, folder=folder / name, file_bytes=FILE_BYTES)
    done, original = 0, BlockRecorder.record

    def counted(recorder, block):
        nonlocal done
        if done == stop_after:
            raise KeyboardInterrupt
        original(recorder, block)
        done += 1

    with patch.object(BlockRecorder, "record", counted):
        return record(config, groups, inputs, recording)


def _error_of(folder, run):
    """Of a run that learns from the student's first weights, as if they were the teacher's."""
    config = config_of(folder, run)
    assert config.teacher is not None
    other = dataclasses.replace(
        config.teacher, checkpoint=str(folder / "start" / "checkpoints"), allow_other_tokenizer=True
    )
    try:
        _trainer(dataclasses.replace(config, teacher=other))
    except MegatronExtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def config_of(folder, run):
    """Its configuration."""
    loss = LossConfig(objective=run.objective, options=run.options, ce_weight=0.5)
    config = objective_run(folder, run.name, loss, **run.parallel)
    assert config.teacher is not None
    cache = run.cache and str(folder / run.cache)
    return dataclasses.replace(
        config,
        teacher=dataclasses.replace(config.teacher, cache=cache),
        training=dataclasses.replace(config.training, micro_batch_size=run.micro_batch_size),
    )

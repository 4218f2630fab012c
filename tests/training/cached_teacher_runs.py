"""What spawned ranks run: students of a teacher's cache, and of one that other libraries run."""

import argparse
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
import yaml

from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers.formed_targets import FormedTargets
from megatron_ext.teachers.huggingface_teacher import HuggingFaceTeacher, StageWithoutTeacher
from megatron_ext.teachers.megatron_teacher import MegatronTeacher, OffloadedTeacher
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.configuration.arguments import config_from_arguments
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.teachers.block_recorder import BlockRecorder
from megatron_ext.training.teachers.recording import Recording, record, recording_config
from tests.training.rank_functions import (
    _train_teacher,
    _trainer,
    error_of,
    read_afresh,
    train_unsaved,
)
from tests.training.tiny_run import TEACHER_PIECES, TP2, changed, checkpoints, objective_run

FILE_BYTES = 1 << 12
"""So that the tiny corpus is several files."""


class CachedRun(NamedTuple):
    """Two steps of a student from its first weights."""

    name: str
    objective: str
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
        ``foreign``, whose teacher has other weights than the cache's: the student's first ones.
    """
    _train_teacher(folder)
    for name, form, parallel in caches:
        _record_live(folder, name, form, **parallel)
    name, form, parallel = caches[0]
    with suppress(KeyboardInterrupt):
        _record_live(folder, "halted", form, stop_after=1, tensor_model_parallel_size=2)
    dist.barrier()
    halted = len(list((folder / "halted").glob("targets-*")))
    (folder / "halted" / ".targets-00-000001.bin.1-00").touch()
    dist.barrier()
    _record_live(folder, "halted", form, **parallel)
    other = {"checkpoint": checkpoints(folder, "start"), "allow_other_tokenizer": True}
    config = changed(cached_config(folder, foreign), teacher=other)
    return train_cached(folder, runs), halted, error_of(lambda: _trainer(config))


def train_cached(folder, runs):
    metrics = {}
    for run in runs:
        trainer = _trainer(cached_config(folder, run))
        if run.form is not None:
            live = {name: FormedTeacher(its, run.form) for name, its in trainer.teachers.items()}
            trainer = replace(trainer, teachers=live)
        assert bool(trainer.teachers) == (run.cache is None)
        metrics[run.name] = train_unsaved(trainer)
    return metrics


def cached_config(folder, run):
    loss = LossConfig(objective=run.objective, ce_weight=0.5)
    size = run.micro_batch_size
    config = objective_run(folder, run.name, loss, micro_batch_size=size, **run.parallel)
    return changed(config, teacher={"cache": run.cache and str(folder / run.cache)})


def _record_live(folder, name, form, *, stop_after=None, **parallel):
    """A cache in ``folder / name``; ``stop_after`` so many files it ends as if it were killed."""
    config = cached_config(folder, CachedRun(name, "alm", None, parallel))
    done, original = 0, BlockRecorder.record

    def counted(recorder, block):
        nonlocal done
        if done == stop_after:
            raise KeyboardInterrupt
        original(recorder, block)
        done += 1

    with patch.object(BlockRecorder, "record", counted):
        _record(config, form, folder / name, FILE_BYTES)


def _record(config, form, folder, file_bytes):
    config = recording_config(config, folder, world_size=dist.get_world_size())
    groups, inputs = read_afresh(config)
    form = replace(form, vocab_size=inputs.teachers["teacher"].tokenizer.vocab_size)
    recording = Recording(teacher="teacher", form=form, folder=folder, file_bytes=file_bytes)
    record(config, groups, inputs, recording)


TEXT = "the theory of the other thing then there "


class LibraryRun(NamedTuple):
    """Two steps on packed rows."""

    name: str
    teacher: Mapping[str, Any]
    """What its section has beside checkpoint and length."""

    parallel: Mapping[str, Any]
    objective: str = "vocab_kl"


def write_texts(root):
    """Documents of several lengths; a row holds a few."""
    documents = [TEXT * (1 + i % 3) for i in range(20)]
    for name, part in (("train", documents[:16]), ("held-out", documents[16:])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (root / f"{name}.jsonl").write_text("".join(lines))


def library_values(root, run):
    """From ``root/student`` and ``root/teacher``, which are HuggingFace folders."""
    sizes = {"seq_length": 48, "make_vocab_size_divisible_by": 8}
    return {
        "run_dir": str(root / run.name),
        "initial_checkpoint": str(root / "student"),
        "student": dict(sizes),
        "teacher": {"checkpoint": str(root / "teacher"), "model": dict(sizes), **run.teacher},
        "data": {
            "train": [str(root / "train.jsonl")],
            "validation": [str(root / "held-out.jsonl")],
            "packing": True,
        },
        "loss": {"objective": run.objective},
        "optimizer": {"lr": 1e-3},
        "training": {"train_iters": 2, "global_batch_size": 2},
        "parallel": dict(run.parallel),
    }


def read_values(path, values):
    """The configuration of a file with these values."""
    path.write_text(yaml.safe_dump(values))
    return config_from_arguments(argparse.Namespace(config=str(path)))


def _library_config(root, run):
    path = root / f"{run.name}-{dist.get_rank()}.yaml"
    return read_values(path, library_values(root, run))


def train_libraries(rank, root, runs):
    """Metrics by run; one whose teacher has a ``cache`` records it first, without offload."""
    metrics = {}
    for run in runs:
        if "cache" in run.teacher:
            _record_whole(root, run)
        trainer = _trainer(_library_config(root, run))
        assert isinstance(trainer.teachers.get("teacher"), _class_of(run.teacher))
        metrics[run.name] = train_unsaved(trainer)
    return metrics


def _class_of(teacher):
    if "cache" in teacher:
        return type(None)
    if teacher.get("offload"):
        return OffloadedTeacher
    return HuggingFaceTeacher | StageWithoutTeacher if "library" in teacher else MegatronTeacher


def _record_whole(root, run):
    """All hidden states in fp32, under tensor parallelism."""
    teacher = {key: value for key, value in run.teacher.items() if key != "cache"}
    recorded = LibraryRun(f"record-{run.name}", teacher, TP2)
    config = _library_config(root, recorded)
    size = config.teacher.model.hidden_size
    form = TargetForm.of("hidden", precision="fp32", top_k=0, hidden_size=size, vocab_size=1)
    _record(config, form, Path(run.teacher["cache"]), 1 << 20)

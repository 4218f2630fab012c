"""Short runs of one student by several objectives, which any parallel layout must agree on."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.training.checkpoint import save_checkpoint
from megatron_ext.training.checkpoint_folder import checkpoint_path, set_latest_checkpoint
from megatron_ext.training.config import DataConfig, LossConfig, ParallelConfig, TeacherConfig
from megatron_ext.training.models import sharded_weights
from tests.training.rank_functions import _trainer
from tests.training.tiny_run import student_run, teacher_run

LAYERS = 4
"""A multiple of the stages of every layout."""

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
LAYOUTS = {
    "tp2-pp2": TP2 | PP2,
    "pp2-vp2": PP2 | {"virtual_pipeline_model_parallel_size": 2},
    "tp2-dp2": TP2,
    "pp4": {"pipeline_model_parallel_size": 4},
    "dp4": {},
    "cp2-tp2": CP2 | TP2,
    "cp2-pp2": CP2 | PP2,
}
"""Of four processes; ``pp2-vp2`` has two replicas there."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained; the same under every layout."""

    objective: str

    packing: bool = False

    iterations: int = 2

    held_out: bool = False

    teachers: int = 1
    """2: beside the other one a teacher of another width that has the student's tokenizer."""

    def __str__(self):
        packed, taught = "-packed" * self.packing, "-two-teachers" * (self.teachers == 2)
        return f"{self.objective}{packed}{taught}"


@dataclass(frozen=True, kw_only=True)
class AxisRun:
    """One run."""

    name: str

    variant: Variant

    parallel: Mapping[str, Any] = field(default_factory=dict)

    training: Mapping[str, Any] = field(default_factory=dict)

    goes_on_from: tuple[str, int] | None = None
    """A run, and its iteration whose checkpoint this one resumes."""

    def config(self, folder):
        """Its configuration; the first weights of both models are in ``folder``."""
        base = student_run(folder, self.name)
        teacher = base.teacher
        assert teacher is not None
        training = {
            "train_iters": self.variant.iterations,
            "save_interval": self.variant.iterations,
            "keep_checkpoints": self.variant.iterations,
            **self.training,
        }
        teacher = dataclasses.replace(
            teacher, model=dataclasses.replace(teacher.model, num_layers=LAYERS, seq_length=52)
        )
        two = {"other": teacher, "own": _own_teacher(folder)}
        return dataclasses.replace(
            base,
            student=dataclasses.replace(base.student, num_layers=LAYERS, seq_length=40),
            teacher=teacher if self.variant.teachers == 1 else None,
            teachers=two if self.variant.teachers == 2 else {},
            data=DataConfig(
                train=base.data.train,
                validation=base.data.validation if self.variant.held_out else (),
                packing=self.variant.packing,
            ),
            loss=LossConfig(objective=self.variant.objective, ce_weight=0.5),
            training=dataclasses.replace(base.training, **training),
            parallel=ParallelConfig(**self.parallel),
            initial_checkpoint=str(folder / "start" / "checkpoints"),
        )


def train_runs(rank, folder, runs):
    """One run after the other."""
    for run in runs:
        if rank == 0 and run.goes_on_from is not None:
            before, iteration = run.goes_on_from
            shutil.copytree(folder / before, folder / run.name)
            checkpoints = folder / run.name / "checkpoints"
            set_latest_checkpoint(checkpoint_path(checkpoints, iteration), keep=iteration)
        dist.barrier()
        _trainer(run.config(folder)).train()


def start_and_train(rank, folder, runs):
    """The weights that every run starts from, as checkpoints, and runs of one process."""
    config = teacher_run(folder)
    model = dataclasses.replace(config.student, num_layers=LAYERS)
    _save_start(dataclasses.replace(config, student=model))
    if any(run.variant.teachers == 2 for run in runs):
        own = _own_teacher(folder)
        run_dir = str(folder / "own")
        _save_start(
            dataclasses.replace(config, run_dir=run_dir, tokenizer=own.tokenizer, student=own.model)
        )
    plain = dataclasses.replace(runs[0].variant, teachers=1)
    start = AxisRun(name="start", variant=plain).config(folder)
    _save_start(dataclasses.replace(start, initial_checkpoint=None))
    train_runs(rank, folder, runs)


def _own_teacher(folder):
    base = student_run(folder, "own")
    return TeacherConfig(
        tokenizer=base.tokenizer,
        model=dataclasses.replace(base.student, num_layers=LAYERS, hidden_size=48, seq_length=40),
        checkpoint=str(folder / "own" / "checkpoints"),
    )


def _save_start(config):
    trainer = _trainer(config)
    save_checkpoint(
        Path(config.run_dir) / "checkpoints",
        0,
        {**sharded_weights(trainer.student.chunks), "run": trainer.run_record},
        groups=trainer.groups,
        keep=1,
    )

"""What spawned ranks run in the tests of vocabulary layouts."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from megatron_ext.training.checkpoint import save_checkpoint
from megatron_ext.training.checkpoint_folder import checkpoint_path, set_latest_checkpoint
from megatron_ext.training.config import LossConfig
from megatron_ext.training.models import sharded_weights
from tests.training.rank_functions import _trainer
from tests.training.tiny_run import student_run, teacher_run


class Run(NamedTuple):
    """Two steps of a student, named by a folder."""

    name: str
    vocabulary_layout: str = "co_sharded"
    untied: bool = False
    teacher: str = "teacher"
    objective: str = "projected_kl"
    options: dict[str, Any] | None = None
    parallel: dict[str, Any] | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    goes_on_from: str | None = None
    """A finished run of which this one does the last step again."""

    only_saves: bool = False
    """Instead of that step, save at once what was loaded."""


def config_of(folder, run):
    """A student of 8,001 tokens, a teacher of 32,768; ``tied-teacher`` shares its embeddings."""
    config = student_run(folder, run.name, **(run.parallel or {}))
    assert config.teacher is not None
    is_tied = run.teacher == "tied-teacher"
    teacher = dataclasses.replace(
        config.teacher,
        model=dataclasses.replace(
            config.teacher.model, untie_embeddings_and_output_weights=not is_tied
        ),
        checkpoint=str(folder / run.teacher / "checkpoints"),
    )
    return dataclasses.replace(
        config,
        student=dataclasses.replace(config.student, untie_embeddings_and_output_weights=run.untied),
        teacher=teacher,
        initial_checkpoint=str(folder / f"start-{run.untied}" / "checkpoints"),
        projection=str(folder / "start-False" / "projection.safetensors"),
        loss=LossConfig(objective=run.objective, options=run.options or {}, ce_weight=0.5),
        training=dataclasses.replace(
            config.training,
            train_iters=2,
            global_batch_size=4,
            save_interval=1,
            vocabulary_layout=run.vocabulary_layout,
            precision=run.precision,
        ),
    )


def run_alone(rank, folder, runs, seen):
    """The teachers, the first weights, runs of one rank, and the heads of another."""
    config = teacher_run(folder)
    _trainer(config).train()
    tied = dataclasses.replace(config.student, untie_embeddings_and_output_weights=False)
    _trainer(
        dataclasses.replace(config, run_dir=str(folder / "tied-teacher"), student=tied)
    ).train()
    for untied in (False, True):
        start = dataclasses.replace(
            config_of(folder, Run(f"start-{untied}", "original", untied=untied)),
            initial_checkpoint=None,
            projection=None,
        )
        trainer = _trainer(start)
        save_checkpoint(
            Path(start.run_dir) / "checkpoints",
            0,
            {**sharded_weights(trainer.student.chunks), "run": trainer.run_record},
            groups=trainer.groups,
            keep=1,
        )
    return run_layouts(rank, folder, runs, seen)


def run_layouts(rank, folder, runs, seen):
    """Runs one after the other; then this rank's rows of the heads of both models in another."""
    for run in runs:
        if rank == 0 and run.goes_on_from is not None:
            shutil.copytree(folder / run.goes_on_from, folder / run.name)
            set_latest_checkpoint(checkpoint_path(folder / run.name / "checkpoints", 1), keep=2)
        dist.barrier()
        trainer = _trainer(config_of(folder, run))
        if run.only_saves:
            saved = trainer._saved()
            saved.load()
            saved.save(2, is_last=True)
        else:
            trainer.train()
    trainer = _trainer(config_of(folder, seen))
    student, teacher = trainer.student.chunks[-1], trainer.teacher.chunks[-1]
    weights = student.shared_embedding_or_output_weight(), teacher.output_layer.weight
    return [weight.detach().clone() for weight in weights]

"""Short runs of one student by several objectives, which any parallel layout must agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.training.checkpoint import save_checkpoint
from megatron_ext.training.config import DataConfig, DistillConfig, LossConfig, ParallelConfig
from megatron_ext.training.model_chunks import sharded_weights
from tests.training.rank_functions import _trainer
from tests.training.tiny_run import student_run, teacher_run

LAYERS = 4
"""A multiple of the stages of every layout."""

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "pp2-vp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
    "dp4": {},
    "tp2-dp2": {"tensor_model_parallel_size": 2},
    "tp2-pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
"""Of four processes; ``pp2-vp2`` has two replicas there."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained; the same under every layout."""

    objective: str = "projected_kl"

    packing: bool = False

    untied: bool = False

    def __str__(self) -> str:
        return f"{self.objective}{'-packed' * self.packing}{'-untied' * self.untied}"


@dataclass(frozen=True, kw_only=True)
class AxisRun:
    """One run."""

    name: str

    variant: Variant

    parallel: Mapping[str, Any] = field(default_factory=dict)

    training: Mapping[str, Any] = field(default_factory=dict)

    def config(self, folder: Path) -> DistillConfig:
        """Its configuration; first weights and the teacher's are in ``folder``."""
        base = student_run(folder, self.name)
        teacher = base.teacher
        assert teacher is not None
        start = f"start{'-untied' * self.variant.untied}"
        return dataclasses.replace(
            base,
            student=dataclasses.replace(
                base.student,
                num_layers=LAYERS,
                untie_embeddings_and_output_weights=self.variant.untied,
            ),
            teacher=dataclasses.replace(
                teacher, model=dataclasses.replace(teacher.model, num_layers=LAYERS)
            ),
            data=DataConfig(train=base.data.train, packing=self.variant.packing),
            loss=LossConfig(objective=self.variant.objective, ce_weight=0.5),
            training=dataclasses.replace(
                base.training, **{"train_iters": 2, "save_interval": 100, **self.training}
            ),
            parallel=ParallelConfig(**self.parallel),
            initial_checkpoint=str(folder / start / "checkpoints"),
        )


def train_runs(rank: int, folder: Path, runs: Sequence[AxisRun]) -> None:
    """One run after the other."""
    for run in runs:
        _trainer(run.config(folder)).train()


def start_and_train(rank: int, folder: Path, runs: Sequence[AxisRun]) -> None:
    """The weights that every run starts from, as checkpoints, and runs of one process."""
    config = teacher_run(folder)
    model = dataclasses.replace(config.student, num_layers=LAYERS)
    _save_start(dataclasses.replace(config, student=model))
    for untied in {run.variant.untied for run in runs}:
        first = AxisRun(name=f"start{'-untied' * untied}", variant=Variant(untied=untied))
        _save_start(dataclasses.replace(first.config(folder), initial_checkpoint=None))
    train_runs(rank, folder, runs)


def _save_start(config: DistillConfig) -> None:
    trainer = _trainer(config)
    save_checkpoint(
        Path(config.run_dir) / "checkpoints",
        0,
        {**sharded_weights(trainer.student.chunks), "run": trainer.run_record},
        groups=trainer.groups,
        keep=1,
    )

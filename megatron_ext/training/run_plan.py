"""A run in parts, made once from its configuration.

Code that builds and trains takes the part it needs; below the reading of inputs nothing takes the
whole configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.training.checkpoints.folder import find_checkpoint
from megatron_ext.training.configuration.config import (
    TEACHER,
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)
from megatron_ext.training.configuration.lora import LoraConfig
from megatron_ext.training.configuration.teachers import EvaluationConfig
from megatron_ext.training.run_folder import config_values


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPlan:
    """One teacher with the settings of the whole configuration that apply to it."""

    name: str

    section: str
    """Its section of the configuration, for errors."""

    config: TeacherConfig

    student: ModelConfig

    loss: LossConfig
    """The loss against this teacher: with its own objective, options and temperature."""

    projection: str | None
    """Projection file; None where none is configured."""

    training: TrainingConfig

    parallel: ParallelConfig
    """The layout of the ranks that run it."""

    @classmethod
    def of(cls, config: DistillConfig, name: str) -> TeacherPlan:
        """The teacher ``name`` of a configuration, on the student's ranks."""
        teacher = config.named_teachers[name]
        return cls(
            name=name,
            section=config.section_of(name),
            config=teacher,
            student=config.student,
            loss=config.loss.of_teacher(teacher),
            projection=config.projection_of(name),
            training=config.training,
            parallel=config.parallel,
        )

    @property
    def is_only(self) -> bool:
        """Whether it is the one teacher of a ``teacher`` section."""
        return self.section == TEACHER

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that the configured path stands for now: the latest one of a run's folder.

        Raises:
            CheckpointError: There is none.
        """
        return find_checkpoint(self.config.checkpoint, where=f"{self.section}.checkpoint")

    @property
    def on_own_ranks(self) -> TeacherPlan:
        """The same teacher in the layout of its section ``serving``."""
        serving = self.config.serving
        parallel = ParallelConfig(
            tensor_model_parallel_size=serving.tensor_model_parallel_size,
            pipeline_model_parallel_size=serving.pipeline_model_parallel_size,
            distributed_timeout_minutes=self.parallel.distributed_timeout_minutes,
        )
        return replace(self, parallel=parallel)

    @property
    def options_section(self) -> str:
        """Section with the options of its objective, for errors."""
        is_own = self.config.options or self.config.objective
        return self.section if is_own else "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run of ``megatron-ext distill`` in parts."""

    run_dir: Path
    student: ModelConfig

    teachers: Mapping[str, TeacherPlan]
    """Teachers by name, in the order of the configuration; none in a run that does not distil."""

    data: DataConfig
    loss: LossConfig
    training: TrainingConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig

    lora: LoraConfig | None
    """Adapters of the student."""

    initial_checkpoint: str | None
    """Checkpoint of the student's first weights."""

    evaluation: EvaluationConfig

    projections: tuple[Path, ...]
    """Configured projection files, which checkpoints include."""

    values: Mapping[str, Any]
    """The whole configuration as plain nested values, for records of the run."""

    @classmethod
    def of(cls, config: DistillConfig) -> RunPlan:
        """The parts of a checked configuration."""
        names = config.named_teachers if config.distils else ()
        sections = config.named_teachers.values()
        projections = (config.projection, *(section.projection for section in sections))
        return cls(
            run_dir=Path(config.run_dir),
            student=config.student,
            teachers={name: TeacherPlan.of(config, name) for name in names},
            data=config.data,
            loss=config.loss,
            training=config.training,
            parallel=config.parallel,
            optimizer=config.optimizer,
            lora=config.lora,
            initial_checkpoint=config.initial_checkpoint,
            evaluation=config.evaluation,
            projections=tuple(sorted({Path(path) for path in projections if path})),
            values=config_values(config),
        )

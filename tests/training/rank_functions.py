"""What spawned ranks run in the training tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.training import cpu_megatron
from megatron_ext.training.checkpoint import save_checkpoint
from megatron_ext.training.checkpoint_folder import checkpoint_path, set_latest_checkpoint
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.distill import build_trainer
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.models import build_gpt_model
from megatron_ext.training.trainer import Trainer
from tests.training.tiny_run import ITERATIONS, student_run, teacher_run


def train_alone(rank: int, folder: Path) -> None:
    """A teacher, the student's first weights, and the unsharded run that others are compared to."""
    _trainer(teacher_run(folder)).train()
    start = _trainer(student_run(folder, "start"))
    save_checkpoint(
        Path(start.run_dir) / "checkpoints",
        0,
        {"model": start.student.gpt.sharded_state_dict(), "run": start.run_record},
        groups=start.groups,
        keep=1,
    )
    train_layouts(rank, folder, [("alone", {})])


def train_layouts(rank: int, folder: Path, layouts: list[tuple[str, dict[str, Any]]]) -> None:
    """One run per layout, one after the other, all from the same first weights."""
    for name, parallel in layouts:
        config = student_run(folder, name, **parallel)
        start = str(folder / "start" / "checkpoints")
        _trainer(dataclasses.replace(config, initial_checkpoint=start)).train()


def repeat_last_iteration(rank: int, folder: Path, name: str, parallel: dict[str, Any]) -> None:
    """Resume a finished run from the checkpoint before its last one."""
    config = student_run(folder, name, **parallel)
    if rank == 0:
        before_last = checkpoint_path(Path(config.run_dir) / "checkpoints", ITERATIONS - 1)
        set_latest_checkpoint(before_last, keep=2)
    dist.barrier()
    start = str(folder / "start" / "checkpoints")
    _trainer(dataclasses.replace(config, initial_checkpoint=start)).train()


def first_layer(rank: int, folder: Path) -> torch.Tensor:
    """What this rank's stage draws for its first layer under two pipeline stages."""
    config = student_run(folder, "stages", pipeline_model_parallel_size=2)
    cpu_megatron.install()
    groups = process_groups.initialize(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    gpt = build_gpt_model(
        config.student,
        padded_vocab_size=64,
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    return gpt.decoder.layers[0].mlp.linear_fc1.weight.detach()


def _trainer(config: DistillConfig) -> Trainer:
    """A trainer in a fresh layout over the ranks that are there."""
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    groups = process_groups.initialize(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
    )
    inputs = read_inputs(config, world_size=dist.get_world_size())
    return build_trainer(config, groups, inputs)

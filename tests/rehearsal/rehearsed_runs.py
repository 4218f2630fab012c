"""Runs of ``distill`` on the pretended device and what each step asked of it; the same on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.training.configuration.config import DistillConfig, LossConfig
from megatron_ext.training.distill import build_trainer
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.trainer import Trainer
from tests.rehearsal.pretended_cuda import EVENTS
from tests.training.once import once
from tests.training.rank_functions import fresh_groups
from tests.training.tiny_run import changed, student_run, teacher_run


def _one_step(folder: Path, name: str, objective: str | None = None) -> DistillConfig:
    config = changed(
        student_run(folder, name), data={"validation": ()}, training={"train_iters": 1}
    )
    return config if objective is None else changed(config, loss=LossConfig(objective=objective))


def _few_rows(folder: Path, name: str, objective: str, microbatches: int) -> DistillConfig:
    """By an objective whose kernels take the interpreter long."""
    return changed(
        _one_step(folder, name, objective),
        training={"micro_batch_size": 1, "global_batch_size": microbatches},
    )


RUNS: dict[str, Callable[[Path, str], DistillConfig]] = {
    "teacher": lambda folder, name: changed(teacher_run(folder), training={"global_batch_size": 1}),
    "strict_topk": lambda folder, name: _few_rows(folder, name, "strict_topk", 2),
    "alm": lambda folder, name: _few_rows(folder, name, "alm", 2),
    "validated": lambda folder, name: changed(
        student_run(folder, "validated"), training={"save_interval": 1}
    ),
    # The run before it, for one more step.
    "resumed": lambda folder, name: changed(
        student_run(folder, "validated"), training={"train_iters": 3, "save_interval": 1}
    ),
    "distributed": lambda folder, name: changed(
        _one_step(folder, name),
        parallel={"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    ),
    "linear": lambda folder, name: changed(_one_step(folder, name), loss={"linear": True}),
    "dskd": lambda folder, name: _one_step(folder, name, "dskd"),
    "learned": lambda folder, name: changed(
        _one_step(folder, name), loss={"learned_projection": True}
    ),
    "packed": lambda folder, name: changed(_one_step(folder, name), data={"packing": True}),
    "partition": lambda folder, name: _one_step(folder, name, "partition_kl"),
    "byte_prefix": lambda folder, name: _few_rows(folder, name, "byte_prefix", 1),
}
"""By name; all but the first learn from the teacher that the first makes."""


def rehearse_runs(folder: Path, names: list[str], ranks: int) -> dict[str, Any]:
    """By name of the run its losses, and what its last step asked of this rank's device."""
    with _quickly():
        return {name: _rehearse(_run(folder, name, ranks)) for name in names}


def losses_on_cpu(rank: int, folder: Path, names: list[str], ranks: int) -> dict[str, list[float]]:
    """By name of the run its losses on ranks that have joined over gloo."""
    with _quickly():
        configs = [_run(folder, name, ranks) for name in names]
        return {
            name: _trained(config, fresh_groups(config.parallel.layout))
            for name, config in zip(names, configs, strict=True)
        }


@contextmanager
def _quickly() -> Iterator[None]:
    with once(), patch("megatron_ext.training.metrics.plot_loss_curve"):
        yield


def _run(folder: Path, name: str, ranks: int) -> DistillConfig:
    """A run in bf16, tensor-parallel over the ranks."""
    return changed(
        RUNS[name](folder, name),
        training={"precision": "bf16"},
        parallel={"tensor_model_parallel_size": ranks},
    )


def _trained(config: DistillConfig, groups: ProcessGroups) -> list[float]:
    build_trainer(config, groups, read_inputs(config, world_size=dist.get_world_size())).train()
    # The first rank writes the losses.
    dist.barrier()
    return [row["loss"] for row in read_metrics(Path(config.run_dir))]


def _rehearse(config: DistillConfig) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    iterate = Trainer._iterate

    def recorded(trainer: Trainer, iteration: int) -> dict[str, Any]:
        EVENTS.clear()
        metrics = iterate(trainer, iteration)
        steps.append(
            {
                "waits": EVENTS.lines("wait"),
                "uploads": EVENTS.lines("upload"),
                "microbatches": config.training.global_batch_size
                // config.training.micro_batch_size,
                "pinned": EVENTS.number("pinned upload"),
                "launches": EVENTS.number("launch"),
                "kernels": EVENTS.number("kernel"),
            }
        )
        return metrics

    parallel_state.destroy_model_parallel()
    groups = process_groups.initialize(config.parallel.layout)
    EVENTS.clear()
    with patch.object(Trainer, "_iterate", recorded):
        losses = _trained(config, groups)
    return {
        "device": str(groups.device),
        "steps": len(steps),
        "last": steps[-1],
        "mismatches": EVENTS.lines("mismatch"),
        "losses": losses,
    }

"""Runs of ``distill`` on the pretended device and what each step asked of it; the same on a CPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.evaluation.student_engine import engine_of
from megatron_ext.training.configuration.config import DistillConfig, LossConfig
from megatron_ext.training.distill import build_trainer, rollouts_of
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.trainer import Trainer
from tests.rehearsal.pretended_cuda import EVENTS
from tests.training.layout_runs import EXPERTS, ROUTER_LOSSES
from tests.training.once import once
from tests.training.rank_functions import fresh_groups
from tests.training.rollout_runs import ROLLOUTS
from tests.training.tiny_run import (
    CP2,
    LINEAR_ATTENTION,
    PP2,
    TP2,
    changed,
    checkpoints,
    same_tokenizer_teacher,
    student_run,
    teacher_run,
)


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


SEQUENCE = TP2 | {"sequence_parallel": True}
EXPERT_LAYOUTS = {
    "experts": {"expert_model_parallel_size": 2},
    "experts of ranks": SEQUENCE | {"expert_tensor_parallel_size": 1},
}
SHARDED = dict.fromkeys(
    ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True
)


def _even(config: DistillConfig, parallel: Mapping[str, Any], **student: Any) -> DistillConfig:
    """With sequences that two ranks can share."""
    return changed(
        config,
        student={"seq_length": 40, **student},
        teacher={"model": {"seq_length": 52}},
        parallel=dict(parallel),
    )


def _interleaved(folder: Path, name: str) -> DistillConfig:
    return changed(
        _one_step(folder, name),
        student={"num_layers": 4},
        teacher={"model": {"num_layers": 4}, "checkpoint": checkpoints(folder, "deep teacher")},
        parallel=PP2 | {"virtual_pipeline_model_parallel_size": 2},
    )


def _averaged(folder: Path, name: str) -> DistillConfig:
    """By two teachers that have the student's tokenizer."""
    return changed(
        _one_step(folder, name),
        loss=LossConfig(objective="vocab_kl", teacher_mode="averaged_logits"),
        teacher=None,
        teachers={name: same_tokenizer_teacher(folder, "pipeline") for name in ("one", "two")},
        parallel=dict(PP2),
    )


def _experts(folder: Path, name: str) -> DistillConfig:
    return _even(_one_step(folder, name), EXPERT_LAYOUTS[name], **EXPERTS, **ROUTER_LOSSES)


def _linear_attention(folder: Path, name: str, parallel: Mapping[str, Any]) -> DistillConfig:
    return changed(
        _even(_one_step(folder, name), parallel, **LINEAR_ATTENTION, attention_output_gate=True),
        data={"packing": True},
    )


def _sampled(folder: Path, name: str, parallel: Mapping[str, Any]) -> DistillConfig:
    return changed(_one_step(folder, name), data={"rollouts": ROLLOUTS}, parallel=dict(parallel))


LAYOUT_RUNS: dict[str, Callable[[Path, str], DistillConfig]] = {
    "pipeline": lambda folder, name: student_run(folder, name, **PP2),
    "pipeline resumed": lambda folder, name: changed(
        student_run(folder, "pipeline", **PP2), training={"train_iters": 3, "save_interval": 1}
    ),
    "deep teacher": lambda folder, name: changed(
        teacher_run(folder),
        run_dir=str(folder / name),
        student={"num_layers": 4},
        parallel=dict(PP2),
    ),
    "interleaved": _interleaved,
    "lengths": lambda folder, name: changed(
        _few_rows(folder, name, "projected_kl", 2),
        training={"variable_seq_lengths": True, "seq_length_multiple": 8},
        parallel=dict(PP2),
    ),
    "averaged": _averaged,
    "context": lambda folder, name: _even(student_run(folder, name), CP2),
    "context packed": lambda folder, name: changed(
        _even(_one_step(folder, name, "partition_kl"), CP2), data={"packing": True}
    ),
    "replicas": student_run,
    "replicas sharded": lambda folder, name: student_run(folder, name, **SHARDED),
    "sequence": lambda folder, name: _even(_one_step(folder, name), SEQUENCE),
    "linear attention": lambda folder, name: _linear_attention(folder, name, SEQUENCE),
    "linear attention cut": lambda folder, name: _linear_attention(folder, name, CP2),
    **dict.fromkeys(EXPERT_LAYOUTS, _experts),
    "rollouts": lambda folder, name: _sampled(folder, name, TP2),
    "rollouts pipeline": lambda folder, name: _sampled(folder, name, PP2),
}
"""Those that have a layout of their own, of two ranks."""


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
    """A run in bf16, tensor-parallel over the ranks unless it has a layout of its own."""
    if name in LAYOUT_RUNS:
        config = LAYOUT_RUNS[name](folder, name)
    else:
        over_ranks = {"tensor_model_parallel_size": ranks}
        config = changed(RUNS[name](folder, name), parallel=over_ranks)
    return changed(config, training={"precision": "bf16"})


def _trained(config: DistillConfig, groups: ProcessGroups) -> list[float]:
    inputs = read_inputs(config, world_size=dist.get_world_size())
    trainer = build_trainer(config, groups, inputs)
    if config.data.rollouts is not None:
        engine = engine_of(
            config.data.rollouts, seed=config.training.seed, run_dir=Path(config.run_dir)
        )
        trainer.rollouts = rollouts_of(trainer, engine, inputs.tokenizer)
    trainer.train()
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

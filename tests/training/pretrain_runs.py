"""Runs under our loop and under Megatron-LM's, on spawned ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.data.global_batches import GlobalBatches
from megatron_ext.distributed import process_groups
from megatron_ext.megatron_lm.loop_arguments import loop_flags
from megatron_ext.megatron_lm.pretrain import PretrainDistillation, TrainingStream
from megatron_ext.training import cpu_megatron
from megatron_ext.training.config import ParallelConfig
from megatron_ext.training.distill import build_trainer
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from tests.training import pretrain_stand_in
from tests.training.release_parser import release_parser
from tests.training.tiny_run import STUDENT_VOCAB_SIZE, student_run, teacher_run

STEPS = 2
TERMS = ("loss", "ce", "kd", "grad_norm")


LAYERS = 4
"""A multiple of the stages of every layout."""


def pretrain_config(folder, name, *, precision="fp32", **parallel):
    """Two steps."""
    config = student_run(folder, name)
    assert config.teacher is not None
    teacher_model = dataclasses.replace(config.teacher.model, num_layers=LAYERS)
    return dataclasses.replace(
        config,
        student=dataclasses.replace(config.student, num_layers=LAYERS),
        teacher=dataclasses.replace(config.teacher, model=teacher_model),
        training=dataclasses.replace(
            config.training, train_iters=STEPS, save_interval=STEPS, precision=precision
        ),
        parallel=ParallelConfig(**parallel),
    )


def arguments_of(config, **changes):
    """What Megatron-LM's parser, and what comes after it, make of a configuration's flags."""
    parser = PretrainDistillation.add_arguments(release_parser("core_v0.16.1"))
    found = vars(parser.parse_args(loop_flags(config, vocab_size=STUDENT_VOCAB_SIZE)))
    chunks = found["num_virtual_stages_per_pipeline_rank"]
    after = {"virtual_pipeline_model_parallel_size": chunks, "consumed_train_samples": 0}
    return {**found, **after, **changes}


def train_under_both(rank, folder, layouts):
    """Of each layout what our log has, and what Megatron-LM's loop reports on this rank."""
    teacher = teacher_run(folder)
    _ours(
        dataclasses.replace(
            teacher, student=dataclasses.replace(teacher.student, num_layers=LAYERS)
        )
    )
    found = {}
    for name, options in layouts.items():
        config = pretrain_config(folder, f"{name}-ours", **options)
        _ours(config)
        _initialize(config)
        lent = dataclasses.replace(config, run_dir=str(folder / f"{name}-lent"))
        pretrain_stand_in.set_args(**arguments_of(lent))
        distillation = PretrainDistillation(lent, pretrain_stand_in.get_args)
        original = pretrain_stand_in.get_forward_backward_func
        distillation.take_schedule(pretrain_stand_in)
        try:
            logged = pretrain_stand_in.pretrain(
                distillation.datasets_provider,
                distillation.model_provider,
                None,
                distillation.forward_step,
            )
        finally:
            pretrain_stand_in.get_forward_backward_func = original
        found[name] = (read_metrics(Path(config.run_dir)), logged)
    return found


class Resumed(NamedTuple):
    """Tokens of the second global batch, and how many global batches were read for it."""

    at_once: list[Any]
    from_a_state: list[Any]
    by_reading_again: list[Any]
    reads: list[int]


def resume_streams(rank, folder, layout):
    """The text of one run: read on, and from where a checkpoint says it stood."""
    config = pretrain_config(folder, "resumed", **layout)
    _initialize(config)
    pretrain_stand_in.set_args(**arguments_of(config))
    distillation = PretrainDistillation(config, pretrain_stand_in.get_args)
    distillation.model_provider()
    trainer = distillation._built()
    training = config.training
    count = training.global_batch_size // (training.micro_batch_size * trainer.groups.dp_size)
    stream, *_ = distillation.datasets_provider([1, 1, 0])
    for _ in range(count):
        next(stream)
    # Where ``save_checkpoint`` of Megatron-LM puts it.
    file = folder / f"state/iter_0000001/mp_rank_00/train_dataloader_dprank{rank:03d}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"dataloader_state_dict": stream.save_state()}, file)
    dist.barrier()
    found = [_tokens(stream, count)]
    reads = []
    for saved in (str(folder / "state"), None):
        fresh = dataclasses.replace(trainer, batches=trainer.data.batches(trainer.replica))
        with patch.object(GlobalBatches, "take", autospec=True, side_effect=_TAKE) as take:
            found.append(_tokens(TrainingStream(fresh, done=1, folder=saved), count))
        reads.append(take.call_count)
    return Resumed(*found, reads)


_TAKE = GlobalBatches.take


def _tokens(stream, count):
    return [next(stream).student.tokens.tolist() for _ in range(count)]


def train_and_resume(rank, folder, layouts):
    """Both, in one start of ranks."""
    return train_under_both(rank, folder, layouts), resume_streams(rank, folder, {})


def _ours(config):
    groups = _initialize(config)
    inputs = read_inputs(config, world_size=dist.get_world_size())
    build_trainer(config, groups, inputs).train()
    dist.barrier()


def _initialize(config):
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    return process_groups.initialize(config.parallel.layout)

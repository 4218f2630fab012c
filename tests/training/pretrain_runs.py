"""Runs under our loop and under Megatron-LM's, on spawned ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_ext.data.global_batches import GlobalBatches
from megatron_ext.megatron_lm.loop_arguments import loop_flags
from megatron_ext.megatron_lm.pretrain import PretrainDistillation, TrainingStream
from megatron_ext.training.metrics import read_metrics
from tests.training import pretrain_stand_in
from tests.training.rank_functions import _trainer, fresh_groups
from tests.training.release_parser import release_parser
from tests.training.tiny_run import STUDENT_VOCAB_SIZE, changed, student_run, teacher_run

STEPS = 2
TERMS = ("loss", "ce", "kd", "grad_norm")


LAYERS = 4
"""A multiple of the stages of every layout."""


def pretrain_config(folder, name, *, precision="fp32", placement="student_ranks", **parallel):
    return changed(
        student_run(folder, name),
        student={"num_layers": LAYERS},
        teacher={"model": {"num_layers": LAYERS}, "placement": placement},
        parallel=parallel,
        training={"train_iters": STEPS, "save_interval": STEPS, "precision": precision},
    )


def arguments_of(config):
    """What Megatron-LM's parser, and what comes after it, make of a configuration's flags."""
    parser = PretrainDistillation.add_arguments(release_parser("core_v0.16.1"))
    found = vars(parser.parse_args(loop_flags(config, vocab_size=STUDENT_VOCAB_SIZE)))
    chunks = found["num_virtual_stages_per_pipeline_rank"]
    return found | {"virtual_pipeline_model_parallel_size": chunks, "consumed_train_samples": 0}


def train_under_both(rank, folder, layouts):
    """Of each layout what our log has, and what Megatron-LM's loop reports on this rank."""
    _trainer(changed(teacher_run(folder), student={"num_layers": LAYERS})).train()
    dist.barrier()
    found = {}
    for name, options in layouts.items():
        config = pretrain_config(folder, f"{name}-ours", **options)
        # The loop that is compared with has its teacher beside the student.
        placement, config = config.teacher.placement, _beside(config)
        _trainer(config).train()
        dist.barrier()
        lent = changed(
            config, run_dir=str(folder / f"{name}-lent"), teacher={"placement": placement}
        )
        distillation = _distillation(lent)
        schedule = pretrain_stand_in.get_forward_backward_func
        with patch.object(pretrain_stand_in, "get_forward_backward_func", schedule):
            distillation.take_schedule(pretrain_stand_in)
            logged = pretrain_stand_in.pretrain(
                distillation.datasets_provider,
                distillation.model_provider,
                None,
                distillation.forward_step,
            )
        distillation.close()
        found[name] = (read_metrics(Path(config.run_dir)), logged)
    return found


def _beside(config):
    return changed(config, teacher={"placement": "student_ranks"})


def _distillation(config):
    fresh_groups(config.parallel.layout)
    pretrain_stand_in.set_args(**arguments_of(config))
    return PretrainDistillation(config, pretrain_stand_in.get_args)


class Resumed(NamedTuple):
    """Tokens of the second global batch, and how many global batches were read for it."""

    at_once: list[Any]
    from_a_state: list[Any]
    by_reading_again: list[Any]
    reads: list[int]


def resume_streams(rank, folder, layout):
    """The text of one run: read on, and from where a checkpoint says it stood."""
    config = pretrain_config(folder, "resumed", **layout)
    distillation = _distillation(config)
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
        fresh = replace(trainer, batches=trainer.data.batches(trainer.replica))
        with patch.object(GlobalBatches, "take", autospec=True, side_effect=_TAKE) as take:
            found.append(_tokens(TrainingStream(fresh, done=1, folder=saved), count))
        reads.append(take.call_count)
    return Resumed(*found, reads)


_TAKE = GlobalBatches.take


def _tokens(stream, count):
    return [next(stream).student.tokens.tolist() for _ in range(count)]


def train_and_resume(rank, folder, layouts):
    return train_under_both(rank, folder, layouts), resume_streams(rank, folder, {})

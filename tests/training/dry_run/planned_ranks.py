"""What spawned ranks measure of models that a dry run only counts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.layout import Layout
from megatron_ext.training.config import ParallelConfig, TrainingConfig
from megatron_ext.training.models import build_model_chunks
from megatron_ext.training.student import Student
from tests.training.dry_run.planned_runs import BATCH, PADDED_VOCABULARY, planned_run
from tests.training.rank_functions import fresh_groups


class Measured(NamedTuple):
    """On one rank, for one model."""

    stage: int
    parameters: int
    activations: int | None
    """Bytes that one microbatch's forward pass saves, of a layout with one stage."""


def measure_models(rank, layout, models):
    """Every model, with its precision, under a layout."""
    groups = fresh_groups(Layout(**layout))
    return [_measured(model, precision, layout, groups) for model, precision in models]


def measure_optimizer(rank, cases):
    """Bytes of what a student's training keeps on this rank, after a step.

    Args:
        cases: Precision, and whether the optimizer is distributed.
    """
    groups = fresh_groups(Layout())
    found = []
    for precision, is_distributed in cases:
        config = planned_run(precision=precision, use_distributed_optimizer=is_distributed)
        chunks = build_model_chunks(
            config.student,
            padded_vocab_size=PADDED_VOCABULARY,
            parallel=config.parallel,
            training=config.training,
            groups=groups,
        )
        student = Student(
            chunks, optimizer=config.optimizer, training=config.training, parallel=config.parallel
        )
        for weight in chunks[0].parameters():
            weight.main_grad.fill_(1e-3)
        student.update()
        buffers = [b for ddp in student.ddp for b in ddp.buffers]
        found.append(
            {
                "weights": _bytes(chunks[0].parameters()),
                "gradients": sum(b.grad_data.nbytes for b in buffers),
                "optimizer_state": _optimizer_bytes(student.optimizer, precision),
            }
        )
    return found


def _measured(model, precision, layout, groups):
    (gpt,) = build_model_chunks(
        model,
        padded_vocab_size=PADDED_VOCABULARY,
        parallel=ParallelConfig(**layout),
        training=TrainingConfig(train_iters=1, precision=precision),
        groups=groups,
    )
    parameters = sum(weight.numel() for weight in gpt.parameters())
    is_whole = groups.is_first_stage and groups.is_last_stage
    return Measured(groups.pp_rank, parameters, _saved_bytes(gpt, model) if is_whole else None)


def _saved_bytes(gpt, model):
    """Bytes of all that autograd keeps of a forward pass to the last hidden states."""
    weights = {weight.untyped_storage().data_ptr() for weight in gpt.parameters()}
    length = model.seq_length // gpt.config.context_parallel_size
    tokens = torch.zeros(BATCH, length, dtype=torch.long)
    inputs = {tokens.untyped_storage().data_ptr()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights | inputs:
            saved[storage.data_ptr()] = storage
        return tensor

    gpt.post_process = False
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = gpt(tokens, torch.arange(length).expand(BATCH, -1), None)
    # What the head would keep of it.
    keep(hidden)
    return sum(storage.nbytes() for storage in saved.values())


def _optimizer_bytes(optimizer, precision):
    total = 0
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            total += _bytes(value for name, value in state.items() if name.startswith("exp_avg"))
        if precision == "bf16":
            # The fp32 weights that AdamW moves.
            total += _bytes(w for group in one.optimizer.param_groups for w in group["params"])
    return total


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

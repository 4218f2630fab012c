"""Objectives that ask for more than logits, on one rank; rows of ``sharded_cases.CASES``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_ext.losses import (
    LOSS_REGISTRY,
    BoundaryColumns,
    DistillationInputs,
    DskdProjectors,
    LossOutput,
    VocabularyMatch,
)
from tests.losses.microbatch import Microbatch, columns
from tests.losses.objective_cases import inputs_of, with_hidden_states

Case = Callable[[int, int, Any], tuple[list[torch.Tensor], torch.Tensor]]

PADDING = (15, 5)


def sharded_inputs(rank: int, ranks: int, group: Any, chunks: int) -> DistillationInputs:
    """Inputs with labels of both sides and boundaries, cut to a rank's columns."""
    batch = Microbatch.random(chunks=chunks)
    whole = inputs_of(batch, (0, 0))
    inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=PADDING)
    shards = inputs.student_shard, inputs.teacher.shard
    # Padding belongs to the sets: no rank may count it.
    sets = [torch.arange(shard.start, shard.stop) % 4 == 1 for shard in shards]
    boundary = BoundaryColumns(student=sets[0], teacher=sets[1])
    return replace(inputs, boundary=boundary, teacher_labels=whole.teacher_labels)


def likelihoods(*, chunks: int = 4, **options: Any) -> Case:
    """ALM with ``options``."""

    def run(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        inputs = sharded_inputs(rank, ranks, group, chunks)
        output = LOSS_REGISTRY["alm"](**options)(inputs)
        (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
        return _replicated(output), grad

    return run


def hidden_states(*, chunks: int = 4, from_heads: bool = False, **options: Any) -> Case:
    """DSKD with ``options``; gradients of hidden states and projectors are replicated."""

    def run(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        whole = with_hidden_states(Microbatch.random(chunks=chunks), (0, 0))
        inputs = sharded_inputs(rank, ranks, group, chunks)
        head = columns(whole.student_head_weight.t(), inputs.student_shard).t()
        teacher_head = columns(whole.teacher.head_weight.t(), inputs.teacher.shard).t()
        hidden = whole.student_hidden.requires_grad_()
        targets = replace(whole.teacher, shard=inputs.teacher.shard, head_weight=teacher_head)
        common = torch.arange(0, 23, 2)
        match = VocabularyMatch(common_student=common + 3, common_teacher=common)
        projectors = DskdProjectors(student_hidden=5, teacher_hidden=6)
        if from_heads:
            projectors = DskdProjectors.from_heads(
                head,
                teacher_head,
                match,
                student_shard=inputs.student_shard,
                teacher_shard=targets.shard,
            )
        inputs = replace(
            inputs, student_hidden=hidden, student_head_weight=head, teacher=targets, match=match
        )
        output = LOSS_REGISTRY["dskd"](projectors=projectors, **options)(inputs)
        weights = list(projectors.parameters())
        grad, *replicated = torch.autograd.grad(
            output.loss_sum, [inputs.student_logits, hidden, *weights], materialize_grads=True
        )
        return [*_replicated(output), *replicated], grad

    return run


def _replicated(output: LossOutput) -> list[torch.Tensor]:
    pairs = [part for pair in output.metrics.values() for part in pair]
    return [output.loss_sum.detach(), output.count, *pairs]

"""What objectives ask for beyond logits, on one rank, for ``sharded_cases.py``."""

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
    ProjectedKLLoss,
    VocabularyMatch,
)
from megatron_ext.losses.learned_projection import LearnedProjection
from megatron_ext.projection import SparseProjection
from tests.losses.microbatch import Microbatch, columns, csr_arrays
from tests.losses.objective_cases import (
    inputs_of,
    repeated,
    spelled,
    with_completions,
    with_hidden_states,
)

Case = Callable[[int, int, Any], tuple[list[torch.Tensor], torch.Tensor]]

PADDING = (15, 5)
"""37 + 15 student columns in four shards of 13: the last one is padding alone."""


def with_boundaries(batch: Microbatch, inputs: DistillationInputs) -> DistillationInputs:
    """One rank's inputs with the teacher's labels and tokens that begin a word."""
    shards = inputs.student_shard, inputs.teacher.shard
    # Padding belongs to the sets: no rank may count it.
    sets = [torch.arange(shard.start, shard.stop) % 4 == 1 for shard in shards]
    boundary = BoundaryColumns(student=sets[0], teacher=sets[1])
    labels = inputs_of(batch, (0, 0)).teacher_labels
    return replace(inputs, boundary=boundary, teacher_labels=labels)


def completed(batch: Microbatch, inputs: DistillationInputs) -> DistillationInputs:
    """One rank's inputs with the match and the completions of the batch."""
    whole = with_completions(batch, PADDING)
    return replace(inputs, match=whole.match, completions=whole.completions)


def prefixed(batch: Microbatch, inputs: DistillationInputs) -> DistillationInputs:
    """One rank's inputs with labels that are spelled, and the prefixes of the batch."""
    labels = inputs_of(batch, (0, 0)).teacher_labels
    return spelled(replace(inputs, teacher_labels=labels))


def repeating(batch: Microbatch, inputs: DistillationInputs) -> DistillationInputs:
    """One rank's inputs with labels that repeat a teacher token, and their rows."""
    labels = inputs_of(batch, (0, 0)).teacher_labels
    return repeated(replace(inputs, teacher_labels=labels))


def replicated(output: LossOutput) -> list[torch.Tensor]:
    """What every rank has whole."""
    pairs = [part for pair in output.metrics.values() for part in pair]
    return [output.loss_sum.detach(), output.count, *pairs]


def hidden_states(*, chunks: int = 4, from_heads: bool = False, **options: Any) -> Case:
    """DSKD with ``options``; gradients of hidden states and projectors are replicated."""

    def run(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        batch = Microbatch.random(chunks=chunks)
        whole = with_hidden_states(batch, (0, 0))
        inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=PADDING)
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
        grad, *others = torch.autograd.grad(
            output.loss_sum, [inputs.student_logits, hidden, *weights], materialize_grads=True
        )
        return [*replicated(output), *others], grad

    return run


def learned_projection(
    rank: int, ranks: int, group: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The gradient of the shares, which every rank has whole, and of the logits."""
    batch = Microbatch.random()
    inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=PADDING)
    module = LearnedProjection(
        SparseProjection(*csr_arrays(batch.projection), (37, 23)),
        student_shard=inputs.student_shard,
        teacher_shard=inputs.teacher.shard,
    )
    loss = ProjectedKLLoss()(replace(inputs, projection=module())).loss_sum
    grad, shares = torch.autograd.grad(loss, (inputs.student_logits, module.logits))
    return [loss.detach(), shares], grad

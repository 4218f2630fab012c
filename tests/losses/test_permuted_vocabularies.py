"""Every objective gives what it does by ids when heads, ids and tables are in a layout's order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.losses import (
    BoundaryColumns,
    DistillationInputs,
    IdTable,
    ProjectionShard,
    VocabularyMatch,
)
from megatron_ext.projection.layout import VocabularyLayout, VocabularyOrder
from tests.losses.microbatch import Microbatch, csr_arrays
from tests.losses.objective_cases import CASES, prefix_table

PADDING = (3, 1)


def order_of(vocab_size: int, padding: int, seed: int) -> VocabularyOrder:
    tokens = np.random.default_rng(seed).permutation(vocab_size)
    padded = np.arange(vocab_size, vocab_size + padding)
    return VocabularyOrder(
        ids=np.concatenate([tokens, padded]), vocab_size=vocab_size, rank_count=1
    )


def permuted(
    inputs: DistillationInputs,
    batch: Microbatch,
    student: VocabularyOrder,
    teacher: VocabularyOrder,
) -> DistillationInputs:
    """The same microbatch by places."""
    tables = IdTable.of(student), IdTable.of(teacher)
    rows = [torch.from_numpy(order.ids.copy()) for order in (student, teacher)]
    dense = batch.projection[rows[0][: student.vocab_size]][:, rows[1][: teacher.vocab_size]]
    shape = (student.vocab_size, teacher.vocab_size)
    targets = inputs.teacher
    changed = {
        "logits": lambda logits: logits[..., rows[1]],
        "head_weight": lambda head: head[rows[1]],
        "topk_ids": tables[1].places_of,
    }
    targets = replace(
        targets,
        **{
            name: change(getattr(targets, name))
            for name, change in changed.items()
            if getattr(targets, name) is not None
        },
    )
    head = inputs.student_head_weight
    return replace(
        inputs,
        student_logits=inputs.student_logits.detach()[..., rows[0]].requires_grad_(),
        labels=tables[0].places_of(inputs.labels),
        teacher=targets,
        projection=ProjectionShard.from_csr(
            *csr_arrays(dense),
            shape=shape,
            student_shard=inputs.student_shard,
            teacher_shard=targets.shard,
        ),
        match=VocabularyMatch(
            common_student=tables[0].places_of(inputs.match.common_student),
            common_teacher=tables[1].places_of(inputs.match.common_teacher),
        ),
        teacher_labels=(
            None if inputs.teacher_labels is None else tables[1].places_of(inputs.teacher_labels)
        ),
        boundary=BoundaryColumns(
            student=inputs.boundary.student[rows[0]], teacher=inputs.boundary.teacher[rows[1]]
        ),
        completions=inputs.completions and inputs.completions.by_place(*tables),
        prefix_columns=inputs.prefix_columns
        and prefix_table((student.vocab_size, teacher.vocab_size)).columns(
            inputs.student_shard,
            targets.shard,
            layout=VocabularyLayout(student=student, teacher=teacher, common_counts=(0,)),
        ),
        student_head_weight=None if head is None else head[rows[0]],
    )


@pytest.mark.parametrize("name", CASES)
def test_an_objective_does_not_know_the_order_of_the_vocabularies(name: str) -> None:
    case = CASES[name]
    batch = case.batch()
    by_id = case.build(batch, PADDING)
    sizes = batch.student_logits.shape[-1], batch.teacher_logits.shape[-1]
    student = order_of(sizes[0], PADDING[0], seed=1)
    # Models of one vocabulary can only be compared in one order.
    teacher = order_of(sizes[1], PADDING[1], seed=1 if case.same_tokenizer else 2)
    by_place = permuted(by_id, batch, student, teacher)
    expected, found = case.objective()(by_id), case.objective()(by_place)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=2e-6, atol=2e-6)
    assert torch.equal(found.count, expected.count)
    (truth,) = torch.autograd.grad(expected.loss_sum, by_id.student_logits)
    (gradient,) = torch.autograd.grad(found.loss_sum, by_place.student_logits)
    scale = float(truth.abs().max())
    back = gradient[..., torch.from_numpy(student.places.copy())]
    torch.testing.assert_close(back, truth, rtol=0, atol=5e-6 * scale)

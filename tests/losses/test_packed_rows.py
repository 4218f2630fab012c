"""Every objective over samples in one packed row is what it is over a row each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses import DistillationInputs
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import CASES
from tests.losses.test_every_objective import assert_close, run, sums_of


def with_last_rows_that_predict_nothing(batch: Microbatch) -> Microbatch:
    """As the packed layout has it; samples have different numbers of labels."""
    pairs = []
    for student, teacher in batch.chunk_ids:
        gone = torch.stack([student[-1], teacher[-1]])
        kept = [side.masked_fill(torch.isin(side, gone), -1) for side in (student, teacher)]
        numbers = torch.cat([side[side >= 0] for side in kept]).unique()
        first, second = (
            torch.where(side >= 0, torch.searchsorted(numbers, side), -1) for side in kept
        )
        pairs.append((first, second))
    labels = batch.labels.clone()
    labels[:, -1] = IGNORE_INDEX
    labels[0, 1] = IGNORE_INDEX
    return replace(batch, chunk_ids=pairs, labels=labels)


def packed(inputs: DistillationInputs) -> DistillationInputs:
    """The samples of ``inputs`` one behind the other in one row."""

    def flat(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.detach().flatten(0, 1)[None]

    alignment, teacher = inputs.alignment, inputs.teacher
    assert alignment is not None
    sides = alignment.student_chunk_id, alignment.teacher_chunk_id
    bounds = [torch.arange(0, side.numel() + 1, side.shape[1], dtype=torch.int32) for side in sides]
    logits, labels = flat(inputs.student_logits), flat(inputs.labels)
    assert logits is not None
    assert labels is not None
    if teacher is not None:
        teacher = replace(teacher, logits=flat(teacher.logits), hidden=flat(teacher.hidden))
    return replace(
        inputs,
        student_logits=logits.requires_grad_(),
        labels=labels,
        teacher=teacher,
        teacher_labels=flat(inputs.teacher_labels),
        student_hidden=flat(inputs.student_hidden),
        alignment=AlignmentBatch.from_chunk_ids(
            *(side.reshape(1, -1) for side in sides),
            student_cu_seqlens=bounds[0],
            teacher_cu_seqlens=bounds[1],
        ),
    )


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_have_the_sums_and_gradients_of_rows_of_their_own(name: str) -> None:
    case = CASES[name]
    inputs = case.build(with_last_rows_that_predict_nothing(case.batch()), (3, 1))
    truth, true_grad = run(case, inputs)
    output, grad = run(case, packed(inputs))
    assert int(truth.count) > 0
    for key, value in sums_of(truth).items():
        torch.testing.assert_close(sums_of(output)[key], value, rtol=1e-6, atol=1e-6)
    assert_close(grad, true_grad.flatten(0, 1)[None], 1e-6)

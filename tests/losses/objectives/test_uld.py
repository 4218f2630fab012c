"""ULD over chunks and by position against dense torch in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    DistillationInputs,
    KnownAhead,
    TeacherTargets,
    ULDLoss,
)
from megatron_ext.ops.model_rows import chunk_mean_softmax_reference
from megatron_ext.ops.sorted_l1 import sorted_l1_reference
from tests.losses.microbatch import Microbatch


@pytest.mark.parametrize("top_u", [None, 6])
def test_over_chunks_it_is_the_sorted_l1_of_chunk_means(top_u: int | None) -> None:
    batch = Microbatch.random()
    inputs = batch.inputs(padding=(3, 1))
    output = LOSS_REGISTRY["uld"](temperature=1.5, top_u=top_u)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    alignment, student = batch.alignment(), batch.student_logits.double().requires_grad_()
    q, p = (
        chunk_mean_softmax_reference(logits.flatten(0, 1), ids.flatten(), 12, temperature=1.5)
        for logits, ids in (
            (student, alignment.student_chunk_id),
            (batch.teacher_logits.double(), alignment.teacher_chunk_id),
        )
    )
    truth = 1.5**2 * sorted_l1_reference(q, p, largest=top_u).sum()
    (true_grad,) = torch.autograd.grad(truth, student)
    assert output.loss_sum.item() == pytest.approx(truth.item(), rel=1e-6)
    assert int(output.count) == 12
    scale = true_grad.abs().max().item()
    torch.testing.assert_close(grad[..., :37].double(), true_grad, rtol=0, atol=2e-6 * scale)


def by_position(labels: list[list[int]], teacher_labels: list[list[int]]) -> DistillationInputs:
    """Labels of 0 are trained, others are not."""
    batch = Microbatch.random(batch=len(labels), lengths=(len(labels[0]), len(teacher_labels[0])))
    sides = [
        torch.where(torch.tensor(side) == 0, 0, IGNORE_INDEX) for side in (labels, teacher_labels)
    ]
    return replace(
        batch.inputs(padding=(3, 1)), labels=sides[0], teacher_labels=sides[1], alignment=None
    )


def test_by_position_the_kth_trained_tokens_are_compared_up_to_the_shorter_side() -> None:
    inputs = by_position(
        [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
        [[0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0]],
    )
    output = ULDLoss(alignment="position", top_u=None)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    pairs = [(0, 1, 0), (0, 2, 3), (1, 0, 2), (1, 1, 3), (1, 2, 4)]
    assert int(output.count) == len(pairs)

    student = inputs.student_logits.detach().double().requires_grad_()
    q = torch.softmax(student[..., :37], dim=-1)
    p = torch.softmax(inputs.teacher.logits.double()[..., :23], dim=-1)
    samples, own, other = (list(side) for side in zip(*pairs, strict=True))
    truth = sorted_l1_reference(q[samples, own], p[samples, other]).sum()
    (true_grad,) = torch.autograd.grad(truth, student)
    assert output.loss_sum.item() == pytest.approx(truth.item(), rel=1e-6)
    scale = true_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), true_grad, rtol=0, atol=2e-6 * scale)
    compared = grad.abs().sum(dim=-1) > 0
    assert compared.nonzero().tolist() == [[sample, row] for sample, row, _ in pairs]


def test_what_it_counts_is_known_ahead() -> None:
    inputs = by_position(
        [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
        [[0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0]],
    )
    loss = ULDLoss(alignment="position")
    known = KnownAhead(labels=inputs.labels, teacher_labels=inputs.teacher_labels)
    assert int(loss.count_ahead(known)) == int(loss(inputs).count) == 5
    assert int(loss.count_ahead(replace(known, teacher_labels=None))) == 8


def test_it_does_not_know_which_token_has_a_probability() -> None:
    batch = Microbatch.random(vocabs=(23, 23), lengths=(6, 6), chunks=6)
    shuffled = replace(
        batch,
        teacher_logits=batch.student_logits.roll(7, dims=-1),
        chunk_ids=[(student, student) for student, _ in batch.chunk_ids],
    )
    inputs = shuffled.inputs()
    output = ULDLoss()(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    assert output.loss_sum.item() < 1e-5
    assert not grad.any()


def test_what_the_largest_leave_out_is_in_the_metrics() -> None:
    inputs = Microbatch.random().inputs()
    exact, cut = ULDLoss(top_u=None)(inputs), ULDLoss(top_u=3)(inputs)
    assert exact.metrics["discarded_mass"][0].item() == 0
    missing = (exact.loss_sum - cut.loss_sum).item()
    assert 0 < missing <= cut.metrics["discarded_mass"][0].item()


def _teacher_of(kind: str, inputs: DistillationInputs) -> TeacherTargets:
    return TeacherTargets(kind=kind, shard=inputs.teacher.shard, label_log_probs=torch.zeros(3, 6))


BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher": ({"teacher": None}, "needs a teacher and the teacher's labels; got no teacher"),
    "no labels": ({"teacher_labels": None}, "got no teacher_labels"),
    "labels of another length": (
        {"teacher_labels": torch.zeros(3, 5, dtype=torch.int64)},
        r"labels do not fit its positions .* got \(3, 5\); expected \(3, 6\)",
    ),
    "a chunk mask": (
        {"chunk_mask": torch.ones(12, dtype=torch.bool)},
        "by position has no chunks to leave out",
    ),
    "label targets": (
        {"teacher": _teacher_of("label", Microbatch.random().inputs())},
        "objective uld cannot use these teacher targets; got kind 'label'",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_it_cannot_pair_by_position_are_refused(name: str) -> None:
    parts, message = BAD_INPUTS[name]
    with pytest.raises(LossError, match=message):
        ULDLoss(alignment="position")(replace(Microbatch.random().inputs(), **parts))


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1.0}, "temperature of uld must be positive"),
    "places": ({"top_u": 0}, "top_u of the objective uld compares nothing; got 0"),
    "pairing": ({"alignment": "text"}, "got 'text'; expected one of chunks, position"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_mean_nothing_are_refused(name: str) -> None:
    options, message = BAD_OPTIONS[name]
    with pytest.raises(LossError, match=message):
        ULDLoss(**options)

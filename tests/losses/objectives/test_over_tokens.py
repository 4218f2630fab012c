"""Objectives over tokens: cross-entropy, and the divergence of models of one tokenizer."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    DistillationInputs,
    NextTokenLoss,
    TeacherTargets,
    VocabKLLoss,
)
from megatron_ext.ops.divergence import divergence_reference
from megatron_ext.ops.vocab_kl import vocab_kl_reference
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import as_kind


def test_sum_count_and_gradient_are_those_of_torchs_cross_entropy() -> None:
    batch = Microbatch.random()
    inputs = batch.inputs(padding=(3, 0))
    output = LOSS_REGISTRY["next_token"]()(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)

    logits = batch.student_logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    (true_grad,) = torch.autograd.grad(truth, logits)
    assert output.loss_sum.item() == pytest.approx(truth.item(), rel=1e-6)
    assert int(output.count) == 18
    torch.testing.assert_close(grad[..., :37].double(), true_grad, rtol=0, atol=1e-6)
    assert not grad[..., 37:].any()


def test_accuracy_counts_trained_labels_that_are_the_largest_logit() -> None:
    batch = Microbatch.random()
    batch.student_logits[0, 0, batch.labels[0, 0]] = 30.0
    hits = (batch.student_logits.argmax(dim=-1) == batch.labels).sum()
    total, count = NextTokenLoss()(batch.inputs(padding=(3, 0))).metrics["accuracy"]
    assert int(total) == int(hits) >= 1
    assert int(count) == 18


def test_labels_of_another_length_are_refused() -> None:
    inputs = Microbatch.random().inputs()
    with pytest.raises(LossError, match=r"got \(3, 8, 37\); expected \(3, 6, 37\)"):
        NextTokenLoss()(replace(inputs, labels=inputs.labels[:, :6]))


DIRECTIONS = ("forward", "reverse", "jensen_shannon")


def _batch() -> Microbatch:
    return Microbatch.random(vocabs=(37, 37), lengths=(8, 8))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_sums_the_reference_over_the_ids_of_labels_with_the_temperature_squared_once(
    direction: str,
) -> None:
    batch = _batch()
    inputs = batch.inputs(padding=(3, 1))
    output = VocabKLLoss(direction=direction, temperature=2.0)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    used = batch.labels != IGNORE_INDEX
    student = batch.student_logits.double().requires_grad_()
    truth = vocab_kl_reference(
        student[used],
        batch.teacher_logits.double()[used],
        direction=direction,
        temperature=2.0,
    )
    (true_grad,) = torch.autograd.grad(truth.sum(), student)
    assert output.loss_sum.item() == pytest.approx(truth.sum().item(), rel=1e-6)
    assert int(output.count) == int(used.sum()) == 18
    torch.testing.assert_close(grad[..., :37].double(), true_grad, rtol=0, atol=2e-6)
    assert not grad[..., 37:].any(), "padding has a gradient"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_top_k_targets_are_compared_with_all_other_tokens_as_one(direction: str) -> None:
    batch = _batch()
    whole = batch.inputs(padding=(3, 1))
    inputs = as_kind(whole, "topk", top_k=4)
    objective = VocabKLLoss(direction=direction)
    output = objective(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)

    used = batch.labels != IGNORE_INDEX
    student = batch.student_logits.double().requires_grad_()
    q = torch.softmax(student[used], dim=-1)
    p = torch.softmax(batch.teacher_logits.double()[used], dim=-1)
    top = p.topk(4, dim=-1).indices
    sides = [
        torch.cat([side.gather(-1, top), side.scatter(-1, top, 0.0).sum(-1, keepdim=True)], dim=-1)
        for side in (p, q)
    ]
    truth = divergence_reference(sides[0], sides[1], direction=direction).sum()
    (true_grad,) = torch.autograd.grad(truth, student)
    assert output.loss_sum.item() == pytest.approx(truth.item(), rel=1e-6)
    torch.testing.assert_close(grad[..., :37].double(), true_grad, rtol=0, atol=2e-6)
    rest, count = output.metrics["rest_mass"]
    assert rest.item() == pytest.approx(sides[0][:, -1].sum().item(), rel=1e-5)
    assert int(count) == 18
    assert output.loss_sum < objective(whole).loss_sum, "pooling hides something"


def test_a_student_that_agrees_on_the_top_tokens_and_their_rest_has_no_loss() -> None:
    batch = _batch()
    batch = replace(batch, teacher_logits=batch.student_logits.clone())
    inputs = as_kind(batch.inputs(), "topk", top_k=4)
    output = VocabKLLoss()(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    # The targets' own rounding: 1e-7 of a log-probability.
    assert abs(output.loss_sum.item()) < 1e-6
    assert grad.abs().max() < 1e-6


def _without(**parts: Any) -> DistillationInputs:
    return replace(_batch().inputs(), **parts)


def _teacher(vocab: int, length: int = 8, width: int | None = None) -> TeacherTargets:
    shard = VocabShard(start=0, stop=width or vocab, vocab_size=vocab)
    return TeacherTargets(kind="logits", shard=shard, logits=torch.zeros(3, length, shard.width))


BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher": ({"teacher": None}, "vocab_kl needs a teacher; got no teacher"),
    "other positions": (
        {"teacher": _teacher(37, length=6)},
        r"reads the student's tokens; got positions \(3, 6\); expected \(3, 8\); take an objective",
    ),
    "other vocabulary": (
        {"teacher": _teacher(36, width=37)},
        "the student's vocabulary; got 36 tokens; expected 37",
    ),
    "chunk mask": (
        {"chunk_mask": torch.ones(12, dtype=torch.bool)},
        "positions, not chunks; got a chunk mask; set the labels",
    ),
    "top-k tensors": (
        {
            "teacher": TeacherTargets(
                kind="topk",
                shard=VocabShard(start=0, stop=37, vocab_size=37),
                topk_ids=torch.zeros(3, 8, 4, dtype=torch.int64),
                topk_logits=torch.zeros(3, 8, 5),
                log_normaliser=torch.zeros(3, 8),
            )
        },
        r"do not fit one another; got ids \(3, 8, 4\), logits \(3, 8, 5\)",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_named_with_what_was_expected(name: str) -> None:
    parts, message = BAD_INPUTS[name]
    with pytest.raises(LossError, match=message):
        VocabKLLoss()(_without(**parts))


def test_a_tail_at_another_temperature_is_refused_with_the_reason() -> None:
    inputs = as_kind(_batch().inputs(), "topk", top_k=4)
    with pytest.raises(LossError, match=r"vocab_kl cannot use .*'topk' at this temperature.*2\.0"):
        VocabKLLoss(temperature=2.0)(inputs)

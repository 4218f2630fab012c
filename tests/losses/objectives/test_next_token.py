from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY, NextTokenLoss
from tests.losses.microbatch import Microbatch


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


def test_no_trained_label_gives_zero_with_a_graph() -> None:
    inputs = Microbatch.random().inputs()
    inputs = replace(inputs, labels=torch.full_like(inputs.labels, IGNORE_INDEX))
    output = NextTokenLoss()(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    assert output.loss_sum.item() == 0.0
    assert int(output.count) == 0
    assert not grad.any()


def test_labels_of_another_length_are_refused() -> None:
    inputs = Microbatch.random().inputs()
    with pytest.raises(LossError, match=r"got \(3, 8, 37\); expected \(3, 6, 37\)"):
        NextTokenLoss()(replace(inputs, labels=inputs.labels[:, :6]))

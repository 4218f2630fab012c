from __future__ import annotations

import pytest
import torch

from megatron_ext.errors import LossError, UnknownNameError
from megatron_ext.losses import LOSS_REGISTRY, DistillationLoss, NextTokenLoss, ProjectedKLLoss
from tests.losses.inputs import Microbatch


def test_microbatches_over_their_global_counts_make_the_loss_of_the_whole_batch() -> None:
    batch = Microbatch.random(batch=4)
    loss = DistillationLoss(kd_objective=ProjectedKLLoss(), kd_weight=0.7, ce_weight=0.3)
    whole = loss(batch.inputs())
    assert whole.kd is not None
    assert whole.ce is not None
    counts = {"kd_count": whole.kd.count, "ce_count": whole.ce.count}
    parts = [batch.samples(rows).inputs() for rows in (slice(0, 1), slice(1, 4))]
    shares = [loss.combine(loss(inputs), **counts) for inputs in parts]
    truth = 0.7 * whole.kd.loss_sum / 16 + 0.3 * whole.ce.loss_sum / 24
    assert sum(shares).item() == pytest.approx(truth.item(), rel=1e-6)  # type: ignore[union-attr]
    assert loss.combine(whole, **counts).item() == pytest.approx(truth.item(), rel=1e-6)


def test_the_gradient_is_the_weighted_sum_of_the_terms_gradients() -> None:
    inputs = Microbatch.random().inputs()
    loss = DistillationLoss(kd_objective=ProjectedKLLoss(), kd_weight=2.0, ce_weight=0.5)
    total = loss.combine(loss(inputs), kd_count=3, ce_count=5)
    (grad,) = torch.autograd.grad(total, inputs.student_logits)
    terms = [ProjectedKLLoss()(inputs).loss_sum, NextTokenLoss()(inputs).loss_sum]
    kd, ce = (torch.autograd.grad(term, inputs.student_logits)[0] for term in terms)
    torch.testing.assert_close(grad, kd * 2.0 / 3 + ce * 0.5 / 5)


def test_a_term_without_weight_is_not_computed() -> None:
    inputs = Microbatch.random().inputs()
    only_ce = DistillationLoss(kd_objective=ProjectedKLLoss(), kd_weight=0.0, ce_weight=1.0)
    output = only_ce(inputs)
    assert output.kd is None
    assert output.ce is not None
    combined = only_ce.combine(output, kd_count=0, ce_count=1)
    assert combined.item() == output.ce.loss_sum.item()


@pytest.mark.parametrize("weights", [(0.0, 0.0), (-1.0, 1.0), (1.0, float("nan"))])
def test_weights_that_make_no_loss_are_refused(weights: tuple[float, float]) -> None:
    with pytest.raises(LossError, match="finite and not negative"):
        DistillationLoss(kd_objective=ProjectedKLLoss(), kd_weight=weights[0], ce_weight=weights[1])


def test_an_unknown_objective_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownNameError, match="projected_kl"):
        LOSS_REGISTRY["projected_k"]

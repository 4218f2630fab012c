"""Projected KL and cross-entropy from one sweep, against both from their definitions in fp64."""

import pytest
import torch

from megatron_ext.ops.projected_kl import (
    LearnedEntries,
    ProjectedKLOptions,
)
from tests.ops.kernel_case import ALL_THREE, DEVICE, assert_as_exact
from tests.ops.projected_kl_case import Case, WithLabels

pytest.importorskip("triton")


LABELS = torch.tensor([3, 46, 0, -100, 7, 20, 11, -100], device=DEVICE)
TERMS = WithLabels(
    labels=LABELS,
    weights=torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 0.3, 1.0], device=DEVICE),
    grad_scale=torch.tensor([1.0, 0.0, 2.5], device=DEVICE),
)


def paired():
    return Case.paired(lengths=(8, 7), chunk_count=3)


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize(
    ("direction", "temperature", "dtype"),
    [
        ("forward", 1.0, torch.float32),
        ("forward", 2.0, torch.bfloat16),
        ("reverse", 2.0, torch.float32),
        ("jensen_shannon", 1.0, torch.float16),
    ],
)
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_value_and_gradient_are_the_references(
    implementation, direction, temperature, dtype, in_place
):
    case = paired().rounded(dtype)
    options = {"direction": direction, "temperature": temperature}
    truth, true_grad = TERMS.truth(case, torch.float64, **options)
    plain, plain_grad = TERMS.truth(case, torch.float32, **options)
    padded = torch.nn.functional.pad(case.student_logits, (0, 5), value=1e4)
    leaf = padded.to(dtype).requires_grad_()
    logits = leaf * 1.0
    total, values = TERMS.fused(
        case,
        logits,
        ProjectedKLOptions(temperature=temperature, direction=direction),
        implementation=implementation,
        in_place=in_place,
    )
    (grad,) = torch.autograd.grad(3.0 * total, leaf)
    assert_as_exact(total.detach(), plain, truth, slack=2e-6)
    assert total.dtype == torch.float32
    assert not grad[:, 47:].any()
    # The gradient is rounded as it is stored, and once more as it is weighed by 3.
    slack = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_as_exact(grad[:, :47] / 3.0, plain_grad, true_grad, slack=slack)
    assert not values.token_loss.requires_grad
    exact = torch.nn.functional.cross_entropy(
        case.student_logits, LABELS, reduction="none", ignore_index=-100
    )
    torch.testing.assert_close(values.token_loss.double(), exact, rtol=2e-6, atol=1e-6)
    assert torch.equal(logits.detach(), grad) == in_place


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_cross_entropy_is_over_all_tokens_where_mapped_ones_are_far_below(
    implementation, direction
):
    case = paired().to(torch.float32).dominated(120.0)
    truth, true_grad = TERMS.truth(case, torch.float64, direction=direction)
    logits = case.student_logits.float().requires_grad_()
    total, _ = TERMS.fused(
        case, logits, ProjectedKLOptions(direction=direction), implementation=implementation
    )
    (grad,) = torch.autograd.grad(total, logits)
    # What weighs one row against another is a difference of 100 nats, which fp32 holds to 4e-6.
    assert_as_exact(total.detach(), truth, truth, slack=2e-5)
    assert_as_exact(grad, true_grad, true_grad, slack=2e-5)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_rows_that_count_for_nothing_may_hold_anything(implementation):
    case = paired()
    in_second = case.student_chunk_id == 1
    unweighted = (LABELS < 0) | (TERMS.weights == 0)
    nothing = (in_second | (case.student_chunk_id < 0)) & unweighted
    assert nothing.any()
    _, expected = TERMS.truth(case, torch.float64)
    case.student_logits[nothing] = torch.nan
    logits = case.student_logits.float().requires_grad_()
    total, _ = TERMS.fused(case, logits, ProjectedKLOptions(), implementation=implementation)
    (grad,) = torch.autograd.grad(total, logits)
    assert not grad[nothing].any()
    torch.testing.assert_close(grad[~nothing].double(), expected[~nothing], rtol=1e-4, atol=1e-6)


@ALL_THREE
def test_a_label_beyond_the_vocabulary_shows_in_the_sum(implementation):
    beyond = LABELS.clone()
    beyond[0] = 47
    total, values = TERMS._replace(labels=beyond).fused(
        paired(),
        paired().student_logits.float(),
        ProjectedKLOptions(),
        implementation=implementation,
    )
    assert total.isnan()
    assert values.token_loss.isnan().sum() == 1


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_learned_entries_get_theirs_by_kernel_as_by_torch(direction):
    case = paired()
    dense = case.projection.float()
    rows, columns = ((dense > 0) & ((dense > 0).sum(dim=1, keepdim=True) > 1)).nonzero().unbind(1)
    found = []
    for implementation in ("triton", "torch"):
        value = dense[rows, columns].clone()
        entry_gradient = torch.zeros_like(value)
        logits = case.student_logits.float().requires_grad_()
        total, _ = TERMS.fused(
            case,
            logits,
            ProjectedKLOptions(temperature=1.3, direction=direction),
            learned=LearnedEntries(value, rows, columns),
            entry_gradient=entry_gradient,
            implementation=implementation,
        )
        found.append((*torch.autograd.grad(total, logits), entry_gradient))
    for by_kernel, by_torch in zip(*found, strict=True):
        scale = by_torch.abs().max().item()
        assert scale > 1e-3
        torch.testing.assert_close(by_kernel, by_torch, rtol=0, atol=3e-6 * scale)


def test_nothing_is_written_where_no_gradient_is_wanted():
    case = paired()
    logits = case.student_logits.float()
    before = logits.clone()
    total, _ = TERMS.fused(case, logits, ProjectedKLOptions(), in_place=True)
    assert not total.requires_grad
    assert torch.equal(logits, before)

"""Projected KL and cross-entropy from one sweep, against both from their definitions in fp64."""

from dataclasses import replace

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.projected_kl import (
    LearnedEntries,
    ProjectedKLOptions,
    WeightedLabels,
    evaluate_projected_kl,
    projected_kl_reference,
)
from megatron_ext.ops.unit_gradient import kept_gradient
from tests.ops.kernel_case import ALL_THREE, DEVICE, assert_as_exact
from tests.ops.projected_kl_case import Case, column_plan, paired_projection, sharded

pytest.importorskip("triton")


LABELS = torch.tensor([3, 46, 0, -100, 7, 20, 11, -100], device=DEVICE)
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 0.3, 1.0], device=DEVICE)
GRAD_SCALE = torch.tensor([1.0, 0.0, 2.5], device=DEVICE)


def paired():
    case = Case.random(vocabs=(47, 41), lengths=(8, 7), chunk_count=3)
    return replace(case, projection=paired_projection(47, 41)).on(DEVICE)


def reference(case, dtype, **options):
    logits = case.student_logits.detach().clone().to(dtype).requires_grad_()
    chunks = projected_kl_reference(
        logits,
        case.teacher_logits.to(dtype),
        student_chunk_id=case.student_chunk_id,
        teacher_chunk_id=case.teacher_chunk_id,
        chunk_count=3,
        projection=case.projection.to(dtype),
        **options,
    )
    tokens = torch.nn.functional.cross_entropy(logits, LABELS, reduction="none")
    total = (GRAD_SCALE.to(dtype) * chunks).sum() + (WEIGHTS.to(dtype) * tokens).sum()
    return total.detach(), torch.autograd.grad(total, logits)[0]


def fused(case, logits, chosen, padding=0, in_place=False, **options):
    """The weighted sum of chunks and tokens with a graph, and what it is of."""
    student = VocabShard(start=0, stop=47 + padding, vocab_size=47)
    teacher = VocabShard(start=0, stop=41, vocab_size=41)
    rows = torch.nn.functional.pad(case.projection.float(), (0, 0, 0, padding))
    found = []

    def evaluate(whole, gradient):
        values = evaluate_projected_kl(
            ChunkedLogits.of(whole, case.student_chunk_id, 3, student),
            ChunkedLogits.of(
                case.teacher_logits.to(logits.dtype), case.teacher_chunk_id, 3, teacher
            ),
            sharded(rows, column_plan(case.projection, student, teacher)),
            chosen,
            cross_entropy=WeightedLabels(LABELS, WEIGHTS),
            grad_scale=GRAD_SCALE,
            gradient=gradient,
            **options,
        )
        found.append(values)
        chunks = torch.where(GRAD_SCALE == 0, 0.0, values.chunk_loss * GRAD_SCALE)
        tokens = torch.where(WEIGHTS == 0, 0.0, values.token_loss * WEIGHTS)
        return (chunks.sum() + tokens.sum(),)

    (total,) = kept_gradient(logits, evaluate, in_place=in_place)
    return total, found[0]


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
    case = paired()
    case = replace(
        case,
        student_logits=case.student_logits.to(dtype).double(),
        teacher_logits=case.teacher_logits.to(dtype).double(),
    )
    options = {"direction": direction, "temperature": temperature}
    truth, true_grad = reference(case, torch.float64, **options)
    plain, plain_grad = reference(case, torch.float32, **options)
    padded = torch.nn.functional.pad(case.student_logits, (0, 5), value=1e4)
    leaf = padded.to(dtype).requires_grad_()
    logits = leaf * 1.0
    total, values = fused(
        case,
        logits,
        ProjectedKLOptions(temperature=temperature, direction=direction),
        padding=5,
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
    truth, true_grad = reference(case, torch.float64, direction=direction)
    logits = case.student_logits.float().requires_grad_()
    total, _ = fused(
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
    unweighted = (LABELS < 0) | (WEIGHTS == 0)
    nothing = (in_second | (case.student_chunk_id < 0)) & unweighted
    assert nothing.any()
    _, expected = reference(case, torch.float64)
    case.student_logits[nothing] = torch.nan
    logits = case.student_logits.float().requires_grad_()
    total, _ = fused(case, logits, ProjectedKLOptions(), implementation=implementation)
    (grad,) = torch.autograd.grad(total, logits)
    assert not grad[nothing].any()
    torch.testing.assert_close(grad[~nothing].double(), expected[~nothing], rtol=1e-4, atol=1e-6)


@ALL_THREE
def test_a_label_beyond_the_vocabulary_shows_in_the_sum(implementation, monkeypatch):
    beyond = LABELS.clone()
    beyond[0] = 47
    monkeypatch.setitem(globals(), "LABELS", beyond)
    total, values = fused(
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
        total, _ = fused(
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
    total, _ = fused(case, logits, ProjectedKLOptions(), in_place=True)
    assert not total.requires_grad
    assert torch.equal(logits, before)

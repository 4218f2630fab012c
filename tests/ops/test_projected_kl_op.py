"""The fast projected KL against its reference in fp64, and what a proper KL must do."""

from dataclasses import replace
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.distributed import vocab_parallel
from megatron_ext.ops.projected_kl import projected_kl_reference
from tests.ops.kernel_case import DIRECTIONS, kept_for_backward
from tests.ops.projected_kl_case import Case

CASES = {
    "chunks of several rows": {},
    "one-token sequences": {"lengths": (1, 1), "chunk_count": 1},
    "one chunk of everything": {"lengths": (6, 13), "chunk_count": 1},
    "every row its own chunk": {"lengths": (8, 8), "chunk_count": 8},
    "larger teacher vocabulary": {"vocabs": (5, 64), "lengths": (7, 5)},
    "vocabularies of one token": {"vocabs": (1, 1), "lengths": (4, 4)},
    "no chunk": {"chunk_count": 0},
}


def relative_error(value, truth):
    """Largest error over the largest true magnitude; absolute where the truth is zero."""
    scale = truth.abs().max().item() if truth.numel() else 0.0
    return (value.double() - truth.double()).abs().max().item() / (scale or 1.0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_references_gradient_is_that_of_its_value(direction):
    case = Case.random(vocabs=(7, 5), lengths=(5, 4), chunk_count=2)

    def value(logits):
        return projected_kl_reference(
            logits,
            case.teacher_logits,
            student_chunk_id=case.student_chunk_id,
            teacher_chunk_id=case.teacher_chunk_id,
            chunk_count=2,
            projection=case.projection,
            temperature=1.7,
            direction=direction,
        )

    assert torch.autograd.gradcheck(value, case.student_logits.requires_grad_())


def test_a_case_worked_by_hand():
    # Student (1/2, 1/4, 1/4) onto teacher columns 0, 0, 1: (3/4, 1/4). The teacher says (1/2, 1/2)
    # of what is reachable, and as much again on a column that is not.
    case = Case(
        student_logits=torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log(),
        teacher_logits=torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log(),
        student_chunk_id=torch.tensor([0]),
        teacher_chunk_id=torch.tensor([0]),
        chunk_count=1,
        projection=torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.float64),
    )
    forward = 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)
    reverse = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    for direction, truth in (("forward", forward), ("reverse", reverse)):
        assert case.truth(direction=direction)[0].item() == pytest.approx(truth, rel=1e-12)
        out, _ = case.run(direction=direction)
        assert out.chunk_loss.sum().item() == pytest.approx(truth, rel=1e-12)
    assert out.offsupport_mass.sum().item() == pytest.approx(0.5, rel=1e-12)
    assert out.teacher_entropy.sum().item() == pytest.approx(log(2), rel=1e-12)
    assert out.top1_agreement.sum().item() == 1.0


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("padding", [(0, 0), (3, 9)], ids=["unpadded", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_the_references(name, padding, temperature, direction):
    case = Case.random(**CASES[name])
    truth, true_grad = case.truth(temperature=temperature, direction=direction)
    for dtype, slack in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        plain, plain_grad = case.to(dtype).truth(temperature=temperature, direction=direction)
        out, grad = case.run(
            dtype=dtype, padding=padding, temperature=temperature, direction=direction
        )
        # Where the gradient's terms cancel, plain torch in the same dtype is off by more as well.
        assert relative_error(out.chunk_loss.sum(), truth) < max(
            slack, 2 * relative_error(plain, truth)
        )
        assert relative_error(grad[:, : true_grad.shape[1]], true_grad) < max(
            slack, 2 * relative_error(plain_grad, true_grad)
        )
        assert (grad[:, true_grad.shape[1] :] == 0).all(), "padding has a gradient"


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), chunk_count=st.integers(0, 12), temperature=st.floats(0.5, 4.0))
def test_a_student_that_equals_its_teacher_has_neither_loss_nor_gradient(
    direction, seed, chunk_count, temperature
):
    case = Case.random(vocabs=(19, 19), lengths=(12, 12), chunk_count=chunk_count, seed=seed)
    same = replace(
        case,
        teacher_logits=case.student_logits,
        teacher_chunk_id=case.student_chunk_id,
        projection=torch.eye(19, dtype=torch.float64),
    )
    out, grad = same.run(dtype=torch.float32, temperature=temperature, direction=direction)
    # Sums of 19 probabilities that are 6e-8 off each, times tau^2 = 16 and 12 chunks.
    assert abs(out.chunk_loss.sum().item()) < 2e-5
    assert grad.abs().max().item() < 1e-5
    assert out.top1_agreement.sum().item() == chunk_count


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    chunk_count=st.integers(1, 9),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    direction=st.sampled_from(DIRECTIONS),
)
def test_no_chunk_has_a_negative_divergence(seed, chunk_count, scale, direction):
    case = Case.random(chunk_count=chunk_count, scale=scale, seed=seed)
    out, _ = case.run(direction=direction)
    assert out.chunk_loss.sum().item() >= -1e-12


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_logits_of_ten_thousand_and_minus_infinity_stay_finite(direction):
    case = Case.random(scale=1e4)
    case.student_logits[:, 4:9] = -torch.inf
    case.teacher_logits[:, 1:4] = -torch.inf
    out, grad = case.run(dtype=torch.float32, direction=direction)
    assert out.chunk_loss.sum().isfinite()
    assert grad.isfinite().all()
    assert (grad[:, 4:9] == 0).all()
    # Each chunk costs at most the floor's logarithm, some 80 nats.
    assert 0 < out.chunk_loss.sum().item() < case.chunk_count * 88


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("nats", [20.0, 60.0, 88.0, 400.0, 1e4])
def test_a_sure_student_of_a_token_that_stands_for_nothing_costs_no_less(nats, dtype):
    """Ten tokens for ten of a teacher that has no preference, and one with an empty row."""
    case = Case(
        student_logits=torch.tensor([[0.0] * 10 + [nats]], dtype=dtype),
        teacher_logits=torch.zeros(1, 10, dtype=dtype),
        student_chunk_id=torch.tensor([0]),
        teacher_chunk_id=torch.tensor([0]),
        chunk_count=1,
        projection=torch.eye(11, 10, dtype=torch.float64),
    )
    for direction in DIRECTIONS:
        out, grad = case.run(dtype=dtype, direction=direction)
        assert abs(out.chunk_loss.item()) < 1e-6
        assert grad.abs().max().item() < 1e-6


@pytest.mark.parametrize("options", [{}, {"vocab_topk": 4}, {"temperature": 1.7}], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("nats", [30.0, 120.0, 800.0])
def test_mapped_tokens_far_below_one_that_stands_for_nothing_are_compared_as_ever(
    nats, direction, options
):
    case = Case.random(chunk_count=4).dominated(nats).emptied()
    truth, true_grad = case.truth(direction=direction, **options)
    # Of rows at 800 nats fp64 itself has 1e-13, which weighs one row against another.
    for dtype, slack in ((torch.float64, 2e-12), (torch.float32, 1e-4)):
        for planned in (False, True):
            out, grad = case.run(
                dtype=dtype, padding=(3, 9), planned=planned, direction=direction, **options
            )
            assert relative_error(out.chunk_loss.sum(), truth) < slack
            assert relative_error(grad[:, :37], true_grad) < slack
            assert (out.chunk_loss > 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_student_that_masks_all_that_it_maps_is_taught_nothing(direction):
    case = Case.random(chunk_count=4)
    masked = case.student_chunk_id == 2
    mapped = case.projection.sum(dim=1) > 0
    case.student_logits[masked[:, None] & mapped] = -torch.inf
    out, grad = case.run(dtype=torch.float32, direction=direction)
    assert out.chunk_loss[2] == 0
    assert (out.chunk_loss[[0, 1, 3]] > 0).all()
    assert grad.isfinite().all()
    assert not grad[masked].any()


def test_mass_far_below_the_largest_logit_still_counts():
    case = Case.random(vocabs=(23, 23))
    case = replace(case, projection=torch.eye(23, dtype=torch.float64))
    case.student_logits[:, 0] += 60.0
    truth, true_grad = case.truth()
    out, grad = case.run(dtype=torch.float32)
    assert relative_error(out.chunk_loss.sum(), truth) < 1e-6
    # Logits near 60 hold 4e-6 in fp32, which is the relative error of a probability.
    assert relative_error(grad, true_grad) < 1e-5


def test_rows_of_no_chunk_are_not_looked_at():
    case = Case.random()
    truth, true_grad = case.truth()
    case.student_logits[case.student_chunk_id < 0] = torch.nan
    case.teacher_logits[case.teacher_chunk_id < 0] = torch.nan
    out, grad = case.run()
    assert relative_error(out.chunk_loss.sum(), truth) < 1e-13
    assert relative_error(grad, true_grad) < 1e-13
    assert out.offsupport_mass.sum().isfinite()


@pytest.mark.parametrize("side", ["student_logits", "teacher_logits"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_bad_logit_in_a_chunk_shows_in_the_sum(side, poison):
    case = Case.random(chunk_count=9, lengths=(9, 9))
    getattr(case, side)[2, 5] = poison
    out, _ = case.run(dtype=torch.float32)
    assert out.chunk_loss.sum().isnan()


def test_bf16_logits_are_summed_in_fp32():
    case = Case.random(vocabs=(301, 203), lengths=(40, 30), chunk_count=20)
    rounded = case.rounded(torch.bfloat16)
    truth, true_grad = rounded.truth(temperature=1.3)
    out, grad = rounded.run(dtype=torch.bfloat16, temperature=1.3)
    assert out.chunk_loss.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert relative_error(out.chunk_loss.sum(), truth) < 1e-6
    # The gradient is rounded once, to 8 bits: half a unit is 2^-9 of the value.
    torch.testing.assert_close(grad.double(), true_grad, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("vocab_topk", [1, 5, 22, 23])
def test_the_top_columns_and_the_rest_as_one_are_compared(vocab_topk, direction):
    case = Case.random()
    options = {"direction": direction, "mixture": 0.3, "vocab_topk": vocab_topk}
    truth, true_grad = case.truth(**options)
    out, grad = case.run(padding=(3, 9), **options)
    assert relative_error(out.chunk_loss.sum(), truth) < 1e-13
    assert relative_error(grad[:, :37], true_grad) < 1e-13
    everything, _ = case.run(direction=direction, mixture=0.3)
    if vocab_topk < 20:
        assert (out.chunk_loss < everything.chunk_loss).all(), "pooling hides something"
        assert (out.rest_mass > 0).all()
    else:
        torch.testing.assert_close(out.chunk_loss, everything.chunk_loss)
        assert not out.rest_mass.any()


def test_the_rest_mass_is_the_teachers_outside_the_top_columns():
    case = Case.random(chunk_count=5)
    reachable = (case.projection > 0).any(dim=0)
    probs = torch.softmax(case.teacher_logits.masked_fill(~reachable, -torch.inf), dim=-1)
    out, _ = case.run(vocab_topk=3)
    for chunk in range(5):
        p = probs[case.teacher_chunk_id == chunk].mean(dim=0)
        truth = 1 - p.topk(3).values.sum().item()
        assert out.rest_mass[chunk].item() == pytest.approx(truth, rel=1e-12)


def test_chunks_without_an_upstream_gradient_give_none_whatever_they_hold():
    case = Case.random(chunk_count=4)
    case.student_logits[case.student_chunk_id == 2] = torch.nan
    out, grad = case.run(weights=torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64))
    assert out.chunk_loss[2].isnan()
    used = (case.student_chunk_id == 0) | (case.student_chunk_id == 1)
    assert grad.isfinite().all()
    assert not grad[~used].any()
    assert grad[used].any(dim=-1).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_value_does_not_depend_on_how_rows_are_sliced(monkeypatch, direction):
    case = Case.random(chunk_count=7)
    whole, whole_grad = case.run(direction=direction)
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 80)
    assert len(list(vocab_parallel.row_slices(11, 37, device=torch.device("cpu")))) == 6
    sliced, sliced_grad = case.run(direction=direction)
    for one, other in zip(whole, sliced, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
    torch.testing.assert_close(whole_grad, sliced_grad, rtol=0, atol=1e-15)


def test_metrics_are_those_of_the_chunk_distributions():
    case = Case.random(chunk_count=5)
    out, _ = case.run(temperature=2.0)
    reachable = (case.projection > 0).any(dim=0)
    probs = torch.softmax(case.teacher_logits / 2.0, dim=-1)
    used = case.teacher_chunk_id >= 0
    torch.testing.assert_close(out.offsupport_mass.sum(), probs[used][:, ~reachable].sum())
    kept = torch.where(reachable, probs, 0.0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    carried = torch.softmax(case.student_logits / 2.0, dim=-1) @ case.projection
    entropy, agreed = 0.0, 0
    for chunk in range(5):
        p = kept[case.teacher_chunk_id == chunk].mean(dim=0)
        entropy -= float(torch.xlogy(p, p).sum())
        q = carried[case.student_chunk_id == chunk].mean(dim=0)
        agreed += int(p.argmax() == q.argmax())
    assert out.teacher_entropy.sum().item() == pytest.approx(entropy)
    assert out.top1_agreement.sum().item() == agreed


def test_nothing_as_large_as_the_logits_is_kept_for_backward():
    case = Case.random(vocabs=(400, 30), lengths=(50, 40), chunk_count=10)
    kept = kept_for_backward(lambda: case.run(dtype=torch.float32))
    logits = [tensor for tensor in kept if tensor.shape == (50, 400)]
    assert len(logits) == 1
    assert sum(tensor.numel() for tensor in kept) - logits[0].numel() < 50 * 30

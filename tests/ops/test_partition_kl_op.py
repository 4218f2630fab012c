"""The fast partition KL against its reference in fp64, and what a proper divergence must do."""

from dataclasses import replace
from math import log

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.ops.partition_kl import partition_kl_reference
from megatron_ext.ops.partition_kl.operands import ReferenceChunk
from tests.ops.kernel_case import DIRECTIONS, kept_for_backward
from tests.ops.partition_kl_case import Case

CASES = {
    "chunks of every kind": {},
    "one token a side": {"sizes": ((1, 1),) * 5},
    "one student token": {"sizes": ((1, 2), (1, 4), (1, 3))},
    "one teacher token": {"sizes": ((2, 1), (4, 1))},
    "several a side": {"sizes": ((2, 2), (3, 2)), "completions": 1},
    "every token shared": {"vocabs": (23, 23), "shared": 23},
    "no token shared": {"shared": 0},
    "no completion": {"completions": 0},
    "two tokens": {"vocabs": (2, 2), "shared": 1, "completions": 1},
    "no chunk": {"sizes": ()},
}


def relative_error(value, truth):
    """Largest error over the largest true magnitude, or over 1 where that is larger.

    A divergence is a sum of terms that are as large as a probability and cancel.
    """
    if not truth.numel():
        return 0.0
    error = (value.double() - truth.double()).abs().max().item()
    return error / max(truth.abs().max().item(), 1.0)


def divergences(case, **options):
    out, grad = case.run(**options)
    return out.divergences(), grad


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_references_gradient_is_that_of_its_value(direction):
    case = Case.random(sizes=((1, 1), (1, 2), (2, 1)), vocabs=(5, 4), shared=2, completions=2)

    def value(logits):
        return partition_kl_reference(
            logits,
            case.teacher_logits,
            [*case.singles, *case.chains],
            temperature=1.7,
            direction=direction,
        )

    assert torch.autograd.gradcheck(value, case.student_logits.requires_grad_())


def test_a_case_worked_by_hand():
    # The student writes "17" (token 0) or "18" (1), its teacher "1" (0) and then "7" (1) or "8"
    # (2): 1/2, 1/4 and a rest of 1/4 against 2/3 * (3/8, 3/8) and a rest of 1/3 + 2/3 * 1/4.
    case = Case(
        student_logits=torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log(),
        teacher_logits=torch.tensor([[4, 1, 1], [2, 3, 3]], dtype=torch.float64).log(),
        singles=[],
        chains=[ReferenceChunk([0], [0, 1], [], [0], [(0, 1), (1, 2)])],
        shared=[(0, 0)],
    )
    q, p = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)
    for direction, (first, second) in (("forward", (p, q)), ("reverse", (q, p))):
        truth = sum(a * log(a / b) for a, b in zip(first, second, strict=True))
        assert case.truth(direction=direction)[0].item() == pytest.approx(truth, rel=1e-12)
        chains = case.run(direction=direction)[0].chains
        assert chains.divergence.item() == pytest.approx(truth, rel=1e-12)
    assert chains.student_rest.item() == pytest.approx(0.25, rel=1e-12)
    assert chains.teacher_rest.item() == pytest.approx(0.5, rel=1e-12)
    assert not chains.agreement.item()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("temperature", "padding"), [(1.0, (3, 9)), (2.5, (0, 0))], ids=["padded", "tempered"]
)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradient_equal_the_references(name, padding, temperature, direction):
    case = Case.random(**CASES[name])
    options = {"temperature": temperature, "direction": direction}
    truth, true_grad = case.truth(**options)
    for dtype, slack in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        plain, plain_grad = case.to(dtype).truth(**options)
        value, grad = divergences(case, dtype=dtype, padding=padding, **options)
        # Where the gradient's terms cancel, plain torch in the same dtype is off by more as well.
        assert relative_error(value, truth) < max(slack, 2 * relative_error(plain, truth))
        assert relative_error(grad[:, : true_grad.shape[1]], true_grad) < max(
            slack, 2 * relative_error(plain_grad, true_grad)
        )
        assert (grad[:, true_grad.shape[1] :] == 0).all(), "padding has a gradient"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_student_that_equals_its_teacher_has_neither_loss_nor_gradient(direction):
    case = Case.random(sizes=((1, 1), (2, 2), (1, 1), (4, 4)), vocabs=(19, 19), completions=1)
    rows = [c._replace(teacher_rows=c.student_rows) for c in case.singles]
    chains = [
        c._replace(
            teacher_rows=c.student_rows,
            teacher_prefix=c.student_prefix,
            pairs=[(c.pairs[0][0], c.pairs[0][0])],
        )
        for c in case.chains
    ]
    same = replace(
        case,
        teacher_logits=case.student_logits,
        singles=[c._replace(pairs=[(v, v) for v in range(19)]) for c in rows],
        chains=chains,
        shared=[(v, v) for v in range(19)],
    )
    value, grad = divergences(same, dtype=torch.float32, direction=direction, temperature=1.7)
    # The mixture of equal distributions is off by the rounding of a logarithm; else it is exact.
    assert value.abs().max().item() <= (1e-7 if direction == "jensen_shannon" else 0.0)
    assert grad.abs().max().item() <= 1e-7


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_chunk_has_a_negative_divergence(direction):
    for seed in range(9):
        case = Case.random(seed=seed, scale=(0.1, 3.0, 30.0)[seed % 3])
        assert (divergences(case, direction=direction)[0] >= -1e-14).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_logits_of_ten_thousand_and_minus_infinity_stay_finite(direction):
    case = Case.random(scale=1e4)
    case.student_logits[:, 4:9] = -torch.inf
    case.teacher_logits[:, 1:4] = -torch.inf
    value, grad = divergences(case, dtype=torch.float32, direction=direction)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    assert (grad[:, 4:9] == 0).all()


def test_a_sure_student_has_a_gradient_to_fp32_where_one_minus_its_probability_would_be_lost():
    # Each row is sure of its token to 1e-8: 1 - p is 0 in fp32, and the rest all the loss.
    case = Case.random(sizes=((1, 2), (3, 1)), completions=1, scale=0.5)
    for chunk in case.chains:
        tokens = [*chunk.student_prefix, chunk.pairs[0][0]]
        for row, token in zip(chunk.student_rows, tokens, strict=True):
            case.student_logits[row, token] += 22.0
    truth, true_grad = case.truth()
    value, grad = divergences(case, dtype=torch.float32)
    assert relative_error(value, truth) < 1e-5
    assert relative_error(grad, true_grad) < 1e-5
    assert true_grad.abs().max() > 0.1


def test_rows_of_no_chunk_and_of_uncounted_chains_are_not_looked_at():
    case = Case.random()
    truth, true_grad = case.truth()
    counted = torch.tensor([index != 1 for index in range(len(case.chains))])
    left_out = case.chains[1]
    used = {row for c in [*case.singles, *case.chains] if c != left_out for row in c.student_rows}
    unused = [row for row in range(len(case.student_logits)) if row not in used]
    case.student_logits[unused] = torch.nan
    case.teacher_logits[list(left_out.teacher_rows)] = torch.nan
    value, grad = divergences(case, counted=counted)
    place = len(case.singles) + 1
    assert value[place] == 0
    truth[place] = 0
    assert relative_error(value, truth) < 1e-13
    true_grad[list(left_out.student_rows)] = 0
    assert relative_error(grad, true_grad) < 1e-13


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_bad_logit_in_a_chunk_shows_in_its_divergence(poison):
    case = Case.random()
    case.student_logits[case.singles[0].student_rows[0], 5] = poison
    case.student_logits[case.chains[0].student_rows[0], 5] = poison
    value, _ = divergences(case, dtype=torch.float32)
    assert value.isnan().tolist() == [True, False, False, True, False, False, False]


def test_bf16_logits_are_summed_in_fp32():
    case = Case.random(vocabs=(301, 203), shared=150, completions=20)
    rounded = case.to(torch.bfloat16).to(torch.float64)
    truth, true_grad = rounded.truth(temperature=1.3)
    value, grad = divergences(
        rounded, dtype=torch.bfloat16, temperature=1.3, grad_scale=case.weights()
    )
    assert value.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert relative_error(value, truth) < 1e-6
    # The gradient is rounded once, to 8 bits: half a unit is 2^-9 of the value.
    torch.testing.assert_close(grad.double(), true_grad, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_value_does_not_depend_on_how_rows_are_sliced(monkeypatch, direction):
    case = Case.random()
    whole = divergences(case, direction=direction, padding=(3, 1))
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 80)
    sliced = divergences(case, direction=direction, padding=(3, 1))
    for one, other in zip(whole, sliced, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-15)


def test_agreement_and_rests_are_those_of_the_events():
    case = Case.random(seed=3)
    singles, chains, *_ = case.run()[0]
    q, p = (torch.softmax(x, -1) for x in (case.student_logits, case.teacher_logits))
    for index, chunk in enumerate(case.singles):
        events = []
        for probs, rows, side in ((q, chunk.student_rows, 0), (p, chunk.teacher_rows, 1)):
            own = probs[rows[0], [pair[side] for pair in chunk.pairs]]
            events.append(torch.cat([own, 1 - own.sum()[None]]))
        assert singles.student_rest[index].item() == pytest.approx(events[0][-1].item())
        assert singles.teacher_rest[index].item() == pytest.approx(events[1][-1].item())
        agreed = events[0].argmax() == events[1].argmax()
        assert bool(singles.agreement[index]) == bool(agreed)
    assert len(chains.agreement) == len(case.chains)


def test_nothing_as_large_as_the_logits_is_kept_for_backward_but_their_gradient():
    case = Case.random(vocabs=(400, 300), shared=100)
    kept = kept_for_backward(lambda: case.run(dtype=torch.float32))
    large = [tuple(tensor.shape) for tensor in kept if tensor.numel() > 1000]
    assert large == [tuple(case.student_logits.shape)]

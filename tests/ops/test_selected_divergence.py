"""Divergence over a few tokens of chunks: kernels and torch against what is written out."""

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard
from megatron_ext.ops.divergence import DivergenceOptions, divergence_reference
from megatron_ext.ops.selected_tokens import (
    SelectedPair,
    SelectedTokens,
    evaluate_selected_tokens,
    selected_divergence,
    tokens_of_chunks,
)
from tests.ops.kernel_case import BOTH, DEVICE, DIRECTIONS, assert_as_exact

pytest.importorskip("triton")

ROWS, VOCAB = 12, 41
STUDENT_ROWS, TEACHER_ROWS = [7, 0, 3, 11, 5], [2, 8, 3, 0, 6]


def _spans(rows):
    return torch.stack([torch.tensor(rows), torch.tensor(rows) + 1], dim=1)


def _case(tokens, has_labels, dtype=torch.float32):
    """The student's tokens, and log-probabilities of both models; masked rows among them."""
    generator = torch.Generator().manual_seed(tokens)
    logits = 3 * torch.randn(2, ROWS, VOCAB, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:tokens] for _ in range(ROWS)])
    ids[3, -1] = -1
    # One chunk of which the student masks a token, one of which it masks all, and their teachers.
    logits[0, 0, ids[0, 0]] = -torch.inf
    logits[0, 3, ids[3, ids[3] >= 0]] = -torch.inf
    logits[1, 8, ids[0, 0]] = -torch.inf
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator) if has_labels else None
    if labels is not None:
        # A label among the tokens, none, and one that the student masks beside them.
        labels[7], labels[11], labels[5] = ids[7, 0], -100, 2
        logits[0, 5, 2] = -torch.inf
    shard = VocabShard(start=0, stop=VOCAB, vocab_size=VOCAB)
    student = evaluate_selected_tokens(logits[0].to(dtype), ids, shard, labels=labels)
    its_ids = torch.full_like(ids, -1)
    its_ids[TEACHER_ROWS] = ids[STUDENT_ROWS]
    teacher = evaluate_selected_tokens(logits[1].to(dtype), its_ids, shard)
    return student, teacher


def _compared(case, options, renormalises, implementation):
    found, teacher = case
    log_prob = found.log_prob.detach().to(DEVICE).requires_grad_()
    place = None if found.place is None else found.place.to(DEVICE)
    spans = (_spans(rows).to(DEVICE) for rows in (STUDENT_ROWS, TEACHER_ROWS))
    pair = SelectedPair(log_prob, found._replace(place=place), teacher.log_prob.to(DEVICE), *spans)
    out = selected_divergence(
        pair, options, renormalises=renormalises, implementation=implementation
    )
    # A chunk that gets nothing gives nothing.
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 0.25], dtype=log_prob.dtype, device=DEVICE)
    (grad,) = torch.autograd.grad((weights * out.divergence).sum(), log_prob)
    # What reaches the logits.
    return out, grad - log_prob.detach().exp() * grad.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("has_labels", [False, True])
@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_values_and_gradients_are_as_exact_as_those_of_torch(
    direction, renormalises, has_labels, tokens
):
    options = DivergenceOptions(direction=direction, mixture=0.3)
    exact, true_grad = _compared(
        _case(tokens, has_labels, torch.float64), options, renormalises, "torch"
    )
    case = _case(tokens, has_labels)
    same, single = _compared(case, options, renormalises, "torch")
    got, grad = _compared(case, options, renormalises, "triton")
    # Where one model alone has mass, the smallest number of the dtype stands for the other's.
    shared = exact.divergence.detach() < 30
    for field in ("divergence", "rest_mass"):
        # Beside 1, of which a divergence of 0 is the difference of two.
        values = [1 + getattr(out, field).detach()[shared].double() for out in (got, same, exact)]
        assert_as_exact(*values, slack=5e-7)
    torch.testing.assert_close(got.divergence, same.divergence, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.agreement, exact.agreement)
    assert torch.equal(got.agreement, same.agreement)
    rows = [row for row, keep in zip(STUDENT_ROWS, shared.tolist(), strict=True) if keep]
    grads = [1 + part[rows].double() for part in (grad, single, true_grad)]
    assert_as_exact(*grads, slack=5e-7)
    torch.testing.assert_close(grad, single, rtol=1e-5, atol=1e-5)
    untouched = sorted({*range(ROWS)} - {*STUDENT_ROWS} | {11})
    assert not grad[untouched].any()


@BOTH
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_divergence_is_that_of_the_probabilities(implementation, direction):
    case = _case(5, has_labels=True)
    out, _ = _compared(case, DivergenceOptions(direction=direction), False, implementation)
    q, p = (
        side.without_label(side.log_prob).double().exp()[rows]
        for side, rows in zip(case, (STUDENT_ROWS, TEACHER_ROWS), strict=True)
    )
    truth = divergence_reference(p, q, direction=direction)
    finite = truth.isfinite()
    assert finite.sum() >= 3
    got = out.divergence.detach().cpu().double()[finite]
    torch.testing.assert_close(got, truth[finite], rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("has_partner", [False, True])
def test_tokens_of_chunks_stand_at_their_student_rows(implementation, has_partner):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, 30, (9, 3), generator=generator)
    partner = torch.randint(-1, 99, (30,), generator=generator)
    spans = _spans(STUDENT_ROWS), _spans(TEACHER_ROWS)
    expected = torch.full((ROWS, 3), -1)
    for own, its in zip(STUDENT_ROWS, TEACHER_ROWS, strict=True):
        for place, token in enumerate(ids[its].tolist()):
            partnered = int(partner[token]) if has_partner and token >= 0 else token
            expected[own, place] = partnered
    out = tokens_of_chunks(
        ids.to(DEVICE),
        partner.to(DEVICE) if has_partner else None,
        tuple(span.to(DEVICE) for span in spans),
        ROWS,
        implementation=implementation,
    )
    assert torch.equal(out.cpu(), expected)


@BOTH
@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_not_a_number_shows(implementation, renormalises, side):
    """On the side of the student, of the teacher."""
    case = [part._replace(log_prob=part.log_prob.clone()) for part in _case(5, has_labels=True)]
    case[side].log_prob[(STUDENT_ROWS, TEACHER_ROWS)[side][0]] = torch.nan
    out, _ = _compared(case, DivergenceOptions(), renormalises, implementation)
    assert out.divergence[0].isnan()
    assert not out.divergence[1:].isnan().any()


@BOTH
def test_of_equally_probable_tokens_the_first_is_compared(implementation):
    log_probs = torch.log(
        torch.tensor([[0.3, 0.3, 0.1, 0.3], [0.1, 0.3, 0.3, 0.3], [0.3, 0.1, 0.3, 0.3]])
    ).to(DEVICE)
    nothing = torch.zeros(0, device=DEVICE)
    sums = LogSumExp(nothing, nothing)
    found = SelectedTokens(log_probs, nothing.long(), sums, sums)
    for teacher_row, agrees in ((0, True), (1, False), (2, True)):
        spans = _spans([0]).to(DEVICE), _spans([teacher_row]).to(DEVICE)
        out = selected_divergence(
            SelectedPair(log_probs, found, log_probs, *spans),
            DivergenceOptions(),
            renormalises=False,
            implementation=implementation,
        )
        assert bool(out.agreement) is agrees

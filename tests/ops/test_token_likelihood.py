import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.token_likelihood import (
    TokenRows,
    evaluate_token_likelihood,
    token_likelihood_reference,
    write_likelihood_gradient,
)


def rows_of(rows, vocab, padding, *, dtype):
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    logits = torch.nn.functional.pad(logits, (0, padding), value=99.0).to(dtype)
    token_id = torch.randint(0, vocab, (rows,), generator=generator)
    token_id[1::3] = -100
    # Padding is no member, whatever the set says.
    members = torch.arange(vocab + padding) % 3 == 1
    members[vocab:] = True
    shard = VocabShard(start=0, stop=vocab + padding, vocab_size=vocab)
    return TokenRows(logits, token_id, members, shard)


def gradient_of(rows, out, on_token, on_mass):
    gradient = torch.full_like(rows.logits, torch.nan)
    upstream = (part.to(out.whole.peak.dtype) for part in (on_token, on_mass))
    write_likelihood_gradient(rows, out, *upstream, gradient)
    return gradient


def reference_of(rows):
    """Both numbers, and the fp64 logits that they have a graph to."""
    vocab = rows.shard.vocab_size
    logits = rows.logits.detach()[:, :vocab].double().requires_grad_()
    return *token_likelihood_reference(logits, rows.token_id, rows.members[:vocab]), logits


@pytest.mark.parametrize(("rows", "vocab", "padding"), [(9, 37, 3), (1, 2, 0), (0, 5, 1)])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_values_and_gradient_equal_the_references(rows, vocab, padding, dtype, slack):
    side = rows_of(rows, vocab, padding, dtype=dtype)
    true_prob, true_mass, logits = reference_of(side)
    weights = torch.rand(2, rows, dtype=torch.float64)
    truth = (true_prob * weights[0] + true_mass * weights[1]).sum()
    (true_grad,) = torch.autograd.grad(truth, logits)
    out = evaluate_token_likelihood(side, with_top_column=True)
    value, grad = out.student, gradient_of(side, out, *weights)
    torch.testing.assert_close(value.log_prob.double(), true_prob, rtol=slack, atol=slack)
    torch.testing.assert_close(value.log_mass.double(), true_mass, rtol=slack, atol=slack)
    torch.testing.assert_close(grad[:, :vocab].double(), true_grad, rtol=slack, atol=slack)
    assert (grad[:, vocab:] == 0).all()
    assert torch.equal(out.top_column, side.logits[:, :vocab].argmax(dim=-1))


def test_a_teacher_beside_the_student_changes_neither():
    student, teacher = (rows_of(9, vocab, 2, dtype=torch.float32) for vocab in (37, 23))
    alone, other = (evaluate_token_likelihood(side).student for side in (student, teacher))
    both = evaluate_token_likelihood(student, teacher)
    for value, truth in ((both.student, alone), (both.teacher, other)):
        assert torch.equal(value.log_prob, truth.log_prob)
        assert torch.equal(value.log_mass, truth.log_mass)


def test_a_mass_that_underflows_keeps_its_logarithm_and_a_bounded_gradient():
    logits = torch.tensor([[0.0, -1e4, -1e4, -torch.inf]])
    shard = VocabShard(start=0, stop=4, vocab_size=4)
    members = torch.tensor([False, True, True, True])
    rows = TokenRows(logits, torch.tensor([0]), members, shard)
    out = evaluate_token_likelihood(rows)
    assert out.student.log_mass.item() == pytest.approx(-1e4 + 0.6931, abs=1e-3)
    grad = gradient_of(rows, out, torch.zeros(1), torch.ones(1))
    assert grad.tolist() == [[-1.0, 0.5, 0.5, 0.0]]


def test_a_set_that_is_masked_has_no_mass_and_rows_without_a_gradient_are_not_looked_at():
    logits = torch.zeros(3, 4)
    logits[0, 2:] = -torch.inf
    logits[1] = torch.nan
    shard = VocabShard(start=0, stop=4, vocab_size=4)
    members = torch.tensor([False, False, True, True])
    rows = TokenRows(logits, torch.tensor([0, -1, 1]), members, shard)
    out = evaluate_token_likelihood(rows)
    assert out.student.log_mass[0].item() == -torch.inf
    grad = gradient_of(rows, out, torch.ones(3), torch.tensor([0.0, 0.0, 1.0]))
    assert grad.isfinite().all()
    assert not grad[1].any()


def test_bf16_logits_lose_no_more_than_their_own_rounding():
    side = rows_of(9, 37, 3, dtype=torch.bfloat16)
    true_prob, true_mass, _ = reference_of(side)
    value = evaluate_token_likelihood(side).student
    assert value.log_prob.dtype == torch.float32
    torch.testing.assert_close(value.log_prob.double(), true_prob, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(value.log_mass.double(), true_mass, rtol=1e-6, atol=2e-6)


def test_slices_of_rows_change_nothing(monkeypatch):
    side = rows_of(9, 37, 3, dtype=torch.float32)

    def grad():
        out = evaluate_token_likelihood(side)
        return gradient_of(side, out, *torch.ones(2, 9))

    whole = grad()
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 80)
    assert torch.equal(whole, grad())

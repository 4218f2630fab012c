"""Log-probabilities of labels, and of selected tokens beside the rest."""

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.token_log_prob import (
    evaluate_selected_tokens,
    selected_log_prob_reference,
    token_log_prob,
    token_log_prob_reference,
    write_selected_gradient,
)
from megatron_ext.ops.top_columns import top_columns
from tests.ops.kernel_case import EVERY_COMBINATION


def _inputs(rows, vocab, padding):
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    token_id = torch.randint(0, vocab, (rows,), generator=generator)
    token_id[1::3] = -100
    return logits, token_id, VocabShard(start=0, stop=vocab + padding, vocab_size=vocab)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("rows", "vocab", "padding"), [(9, 37, 3), (1, 2, 0), (0, 5, 1)])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_value_and_gradient_equal_the_references(rows, vocab, padding, temperature, dtype, slack):
    logits, token_id, shard = _inputs(rows, vocab, padding)
    weight = torch.rand(rows, dtype=torch.float64)
    reference = logits.clone().requires_grad_()
    truth = token_log_prob_reference(reference, token_id, temperature=temperature)
    (true_grad,) = torch.autograd.grad((truth * weight).sum(), reference)
    padded = torch.nn.functional.pad(logits, (0, padding), value=99.0).to(dtype).requires_grad_()
    value = token_log_prob(padded, token_id, shard, temperature=temperature)
    (grad,) = torch.autograd.grad((value * weight.to(dtype)).sum(), padded)
    torch.testing.assert_close(value.double(), truth, rtol=slack, atol=slack)
    torch.testing.assert_close(grad[:, :vocab].double(), true_grad, rtol=slack, atol=slack)
    assert (grad[:, vocab:] == 0).all()


def test_the_logits_are_not_overwritten():
    logits, token_id, shard = _inputs(9, 37, 0)
    logits = logits.float().requires_grad_()
    before = logits.detach().clone()
    token_log_prob(logits, token_id, shard).sum().backward()
    assert torch.equal(logits, before)


def test_an_untrained_row_is_not_looked_at_and_a_foreign_token_shows():
    logits, token_id, shard = _inputs(9, 37, 0)
    logits[token_id < 0] = torch.nan
    logits.requires_grad_()
    value = token_log_prob(logits, token_id, shard)
    (grad,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    token_id[0] = 37
    assert token_log_prob(logits, token_id, shard)[0].isnan()


def test_a_row_without_a_gradient_gets_none_whatever_it_holds():
    logits, token_id, shard = _inputs(9, 37, 0)
    token_id[2] = 5
    logits[2] = torch.nan
    logits.requires_grad_()
    value = token_log_prob(logits, token_id, shard)
    assert value[2].isnan()
    kept = torch.arange(9) != 2
    (grad,) = torch.autograd.grad(torch.where(kept, value, 0.0).sum(), logits)
    assert not grad[2].any()
    assert grad[kept].isfinite().all()
    assert grad[kept].any()


def test_bf16_logits_lose_no_more_than_their_own_rounding():
    logits, token_id, shard = _inputs(9, 37, 0)
    rounded = logits.bfloat16()
    truth = token_log_prob_reference(rounded.double(), token_id)
    value = token_log_prob(rounded, token_id, shard)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), truth, rtol=1e-6, atol=1e-6)


def test_slices_of_rows_change_nothing(monkeypatch):
    logits, token_id, shard = _inputs(9, 37, 0)
    logits.requires_grad_()
    whole = torch.autograd.grad(token_log_prob(logits, token_id, shard).sum(), logits)[0]
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 80)
    sliced = torch.autograd.grad(token_log_prob(logits, token_id, shard).sum(), logits)[0]
    assert torch.equal(whole, sliced)


def _selection(rows=9, vocab=37, k=5):
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    ids[1::3, -1] = -1
    return logits, ids


def _selected(logits, ids, shard, weights=None, *, in_place=False, **options):
    """Log-probabilities [T, K + 1], and the gradient of their weighted sum."""
    logits = logits.clone()
    found = evaluate_selected_tokens(logits, ids, shard, **options)
    if weights is None:
        return found.log_prob
    gradient = logits if in_place else torch.full_like(logits, torch.nan)
    write_selected_gradient(logits, found, weights, shard, gradient, **options)
    return found.log_prob, gradient


def _shard(vocab, padding=0):
    return VocabShard(start=0, stop=vocab + padding, vocab_size=vocab)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("vocab", "k"), [(37, 5), (37, 1), (37, 36), (2, 1)])
def test_selected_values_and_gradient_equal_the_references(vocab, k, temperature):
    logits, ids = _selection(vocab=vocab, k=k)
    weights = torch.rand(9, k + 1, dtype=torch.float64)
    reference = logits.clone().requires_grad_()
    truth = selected_log_prob_reference(reference, ids, temperature=temperature)
    named = truth > -torch.inf
    (true_grad,) = torch.autograd.grad(truth[named], reference, weights[named])
    padded = torch.nn.functional.pad(logits, (0, 3), value=80.0)
    # What is not there gets a weight, too, and gives nothing for it.
    value, grad = _selected(padded, ids, _shard(vocab, 3), weights, temperature=temperature)
    torch.testing.assert_close(value, truth.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad[:, :vocab], true_grad, rtol=1e-11, atol=1e-13)
    assert not grad[:, vocab:].any()


def test_with_every_token_selected_nothing_is_left():
    logits, _ = _selection(vocab=4)
    ids = torch.arange(4).expand(9, 4)
    value, grad = _selected(logits, ids, _shard(4), torch.ones(9, 5, dtype=torch.float64))
    torch.testing.assert_close(value[:, :4], torch.log_softmax(logits, dim=-1))
    assert (value[:, 4] == -torch.inf).all()
    assert grad.isfinite().all()


def test_a_tiny_rest_keeps_its_digits_in_fp32():
    logits = torch.tensor([[0.0, -30.0, -31.0, -40.0], [9e3, -1e3, -torch.inf, 8.9e3]])
    value = _selected(logits, torch.tensor([[0], [0]]), _shard(4))
    truth = torch.logsumexp(torch.tensor([-30.0, -31.0, -40.0]).double(), dim=0).item()
    assert value[0, 1].item() == pytest.approx(truth, rel=1e-6)
    assert value[1].tolist() == pytest.approx([0.0, -100.0])


def test_a_row_that_gets_no_gradient_is_not_looked_at():
    logits, ids = _selection()
    logits[3] = torch.nan
    weights = torch.ones(9, 6, dtype=torch.float64)
    weights[3] = 0.0
    _, grad = _selected(logits, ids, _shard(37), weights, in_place=True)
    assert grad.isfinite().all()
    assert not grad[3].any()


def test_slices_of_rows_change_no_selected_value(monkeypatch):
    logits, ids = _selection()
    weights = torch.rand(9, 6, dtype=torch.float64)
    whole = _selected(logits, ids, _shard(37), weights)
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 80)
    sliced = _selected(logits, ids, _shard(37), weights, in_place=True)
    assert all(map(torch.equal, whole, sliced))
    assert top_columns(logits, 7, _shard(37)).tolist() == (
        torch.topk(logits.detach().float(), 7, dim=-1).indices.tolist()
    )


def test_top_columns_are_those_of_the_largest_logits_and_the_lowest_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 9.0], [-0.0, 0.0, -1.0, -torch.inf, 9.0]])
    shard = VocabShard(start=0, stop=5, vocab_size=4)
    assert top_columns(logits, 3, shard).tolist() == [[1, 2, 0], [0, 1, 2]]
    allowed = torch.tensor([True, False, True, True, True])
    assert top_columns(logits, 4, shard, allowed).tolist() == [[2, 0, 3, -1], [0, 2, 3, -1]]
    assert top_columns(logits[:0], 3, shard).shape == (0, 3)


LOOP_DTYPES = {"fp32": (torch.float32, 2e-6), "bf16": (torch.bfloat16, 2**-8)}


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("vocab", "k"), [(20_000, 64), (37, 36), (2, 1)])
@pytest.mark.parametrize("name", LOOP_DTYPES if EVERY_COMBINATION else ["fp32"])
def test_loops_select_with_the_values_and_gradient_of_the_reference(name, vocab, k, temperature):
    pytest.importorskip("numba")
    dtype, rounding = LOOP_DTYPES[name]
    logits, ids = _selection(vocab=vocab, k=k)
    # Both start from the same numbers; the probability of one token is 0 in fp32.
    logits[2, ids[2, 0]] = -300.0
    logits = logits.to(dtype).double()
    weights = torch.rand(9, k + 1, dtype=torch.float64)
    weights[4] = 0.0
    reference = logits.clone().requires_grad_()
    truth = selected_log_prob_reference(reference, ids, temperature=temperature)
    named = truth > -torch.inf
    (true_grad,) = torch.autograd.grad(truth[named], reference, weights[named])
    padded, shard = torch.nn.functional.pad(logits, (0, 3), value=80.0).to(dtype), _shard(vocab, 3)
    options = {"temperature": temperature, "implementation": "cpu"}
    value, grad = _selected(padded, ids, shard, weights.float(), **options)
    _, over = _selected(padded, ids, shard, weights.float(), in_place=True, **options)
    assert torch.equal(over, grad)
    torch.testing.assert_close(value.double(), truth.detach(), rtol=2e-6, atol=2e-6)
    largest = true_grad.abs().max().item()
    # A gradient is rounded once, and is a difference of numbers of the size of its largest.
    torch.testing.assert_close(
        grad[:, :vocab].double(), true_grad, rtol=rounding, atol=2e-6 * largest
    )
    assert not grad[:, vocab:].any()
    assert not grad[4].any()


def test_loops_do_not_look_at_a_row_without_a_gradient_and_leave_nothing_of_an_empty_rest():
    pytest.importorskip("numba")
    logits = torch.randn(2, 4)
    logits[1] = torch.nan
    ids = torch.arange(4).expand(2, 4)
    weights = torch.tensor([[1.0] * 5, [0.0] * 5])
    value, grad = _selected(logits, ids, _shard(4), weights, implementation="cpu")
    assert value[0, 4] == -torch.inf
    torch.testing.assert_close(value[0, :4], torch.log_softmax(logits[0], dim=-1))
    torch.testing.assert_close(grad[0], 1 - 4 * torch.softmax(logits[0], dim=-1))
    assert not grad[1].any()


@pytest.mark.parametrize("name", LOOP_DTYPES if EVERY_COMBINATION else ["fp32"])
@pytest.mark.parametrize("k", [1, 64, 2000])
def test_loops_find_the_top_columns_of_torch(k, name):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(k)
    logits = (8 * torch.randn(7, 2503, generator=generator)).round() / 8
    logits[1] = 0.0
    logits[1, ::3] = -0.0
    logits[2, 5:] = -torch.inf
    logits = logits.to(LOOP_DTYPES[name][0])
    shard = VocabShard(start=10000, stop=12503, vocab_size=12500)
    allowed = torch.arange(2503) % 4 != 1
    for given in (None, allowed):
        by_loops, by_torch = (
            top_columns(logits, k, shard, given, implementation=by) for by in ("cpu", "torch")
        )
        assert torch.equal(by_loops, by_torch)

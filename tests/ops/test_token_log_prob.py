"""Log-probabilities of labels."""

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.token_log_prob import token_log_prob, token_log_prob_reference


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

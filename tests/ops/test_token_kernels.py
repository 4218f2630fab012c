"""Log-probabilities of tokens, and masses of sets of tokens, by kernel and by torch."""

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import local_column
from megatron_ext.ops.token_likelihood import (
    TokenRows,
    evaluate_token_likelihood,
    token_likelihood_reference,
    write_likelihood_gradient,
)
from megatron_ext.ops.token_log_prob import (
    evaluate_cross_entropy,
    token_log_prob_reference,
    token_prediction,
)
from tests.ops.kernel_case import ALL_THREE, DEVICE, DTYPES, assert_as_exact, combinations, rounding

pytest.importorskip("triton")

SMALL = [(1, 7), (0, 9)]
"""Rows and vocabulary."""


def _case(rows, vocab, dtype):
    """Logits with five columns of padding that would win and gaps between rows, and tokens.

    The numbers are those of a CPU's generator on every device.
    """
    torch.manual_seed(rows)
    wide = torch.full((rows, vocab + 8), 1e4, dtype=dtype, device=DEVICE)
    wide[:, :vocab] = 3 * torch.randn(rows, vocab)
    token_id = torch.randint(0, vocab, (rows,)).to(DEVICE)
    token_id[1::3] = -100
    return wide[:, : vocab + 5], token_id, VocabShard(start=0, stop=vocab + 5, vocab_size=vocab)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype", "temperature"),
    [
        *((4, 4133, *case) for case in combinations(DTYPES, (1.0, 2.5))),
        *((*size, torch.float32, 1.0) for size in SMALL),
    ],
    ids=str,
)
def test_cross_entropy_and_its_gradient_are_as_exact_as_torch(
    implementation, rows, vocab, dtype, temperature
):
    logits, token_id, shard = _case(rows, vocab, dtype)
    weights = (torch.rand(rows) + 0.1).to(DEVICE)
    found = []
    for exact in (torch.float32, torch.float64):
        given = logits[:, :vocab].to(exact).requires_grad_()
        loss = -token_log_prob_reference(given, token_id, temperature=temperature)
        (grad,) = torch.autograd.grad((loss * weights.to(exact)).sum(), given)
        found.append((loss.detach(), grad))
    (loss, grad), (true_loss, true_grad) = found
    gradient = torch.empty_like(logits)
    out = evaluate_cross_entropy(
        logits,
        token_id,
        shard,
        temperature=temperature,
        grad_scale=weights,
        gradient=gradient,
        implementation=implementation,
    )
    assert_as_exact(out.row_loss, loss, true_loss, slack=1e-6)
    slack = rounding(dtype) + 1e-6
    assert_as_exact(gradient[:, :vocab], grad.to(dtype), true_grad, slack=slack)
    assert not gradient[:, vocab:].any()
    asked = token_id >= 0
    assert torch.equal(out.top_column[asked], logits[:, :vocab].argmax(dim=-1)[asked])


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
def test_the_gradient_of_cross_entropy_can_take_the_place_of_the_logits(implementation):
    logits, token_id, shard = _case(4, 4133, torch.bfloat16)
    apart = torch.empty_like(logits)
    grad_scale = torch.tensor([1.0, 1.0, 0.0, 2.0], device=DEVICE)
    logits[1:3] = torch.nan
    options = {"grad_scale": grad_scale, "implementation": implementation}
    out = evaluate_cross_entropy(logits, token_id, shard, gradient=apart, **options)
    evaluate_cross_entropy(logits, token_id, shard, gradient=logits, **options)
    assert torch.equal(logits, apart)
    assert not apart[1:3].any()
    assert apart[0].any()
    assert apart[3].any()
    assert out.row_loss[1:3].tolist() == [0.0, 0.0]


@ALL_THREE
@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_token_gets_may_differ_from_the_scale(implementation, in_place):
    logits, token_id, shard = _case(4, 40, torch.float32)
    leaf = logits.clone().requires_grad_()
    grad_scale = torch.tensor([-1.0, 1.0, 0.0, 0.5], device=DEVICE)
    got = torch.tensor([-1.0, 1.0, 1.0, 2.0], device=DEVICE)
    out = token_prediction(
        leaf * 1.0,
        token_id,
        shard,
        grad_scale=grad_scale,
        in_place=in_place,
        implementation=implementation,
    )
    (grad,) = torch.autograd.grad((out.log_prob * got).sum(), leaf)
    given = logits[:, :40].double().requires_grad_()
    truth = token_log_prob_reference(given, token_id)
    (true_grad,) = torch.autograd.grad((truth * got * (grad_scale != 0)).sum(), given)
    torch.testing.assert_close(grad[:, :40].double(), true_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        out.log_prob.double(), truth.detach() * (grad_scale != 0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype", "in_place"),
    [
        *((4, 4133, *case) for case in combinations(DTYPES, (False, True))),
        *((*size, torch.float32, False) for size in SMALL),
    ],
    ids=str,
)
def test_likelihoods_and_their_gradient_are_as_exact_as_torch(
    implementation, rows, vocab, dtype, in_place
):
    logits, token_id, shard = _case(rows, vocab, dtype)
    members = torch.arange(vocab + 5, device=DEVICE) % 3 == 1
    members[vocab:] = True
    # The set's mass: ordinary, then so small that its shares are no multiples of probabilities.
    logits[2:, :vocab][:, members[:vocab]] -= 40
    weights = torch.rand(2, rows).to(DEVICE)
    found = []
    for exact in (torch.float32, torch.float64):
        given = logits[:, :vocab].to(exact).requires_grad_()
        both = token_likelihood_reference(given, token_id, members[:vocab])
        total = sum((value * weight).sum() for value, weight in zip(both, weights, strict=True))
        (grad,) = torch.autograd.grad(total, given)
        found.append((*(value.detach() for value in both), grad))
    side = TokenRows(logits, token_id, members, shard)
    known = evaluate_token_likelihood(side, implementation=implementation)
    out, grad = known.student, logits if in_place else torch.empty_like(logits)
    write_likelihood_gradient(side, known, *weights, grad, implementation=implementation)
    assert_as_exact(out.log_prob, found[0][0], found[1][0], slack=1e-6)
    assert_as_exact(out.log_mass, found[0][1], found[1][1], slack=1e-6)
    # A share of the set by its probability is off by the rounding of a log-mass of 20.
    slack = rounding(dtype) + 3e-6
    assert_as_exact(grad[:, :vocab], found[0][2].to(dtype), found[1][2], slack=slack)
    assert not grad[:, vocab:].any()


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_rows_of_a_chunk_that_gets_nothing_give_exactly_nothing(implementation):
    logits, token_id, shard = _case(4, 60, torch.float32)
    members = torch.arange(65, device=DEVICE) < 9
    logits[2, :9] = -torch.inf
    logits[3] = torch.nan
    rows = TokenRows(logits, token_id, members, shard)
    out = evaluate_token_likelihood(rows, implementation=implementation)
    assert out.student.log_mass[2] == -torch.inf
    gradient = torch.empty_like(logits)
    on_token = torch.tensor([1.0, 5.0, 1.0, 0.0], device=DEVICE)
    on_mass = torch.tensor([-1.0, 0.0, 0.0, 0.0], device=DEVICE)
    write_likelihood_gradient(rows, out, on_token, on_mass, gradient, implementation=implementation)
    # The first row's two parts cancel in every column but the token's and the set's.
    assert (gradient[0] != 0).nonzero()[:, 0].tolist() == sorted({*range(9), int(token_id[0])})
    # Row 1 has no token: what arrives for it is not looked at.
    assert not gradient[[1, 3]].any()
    assert gradient[2].isfinite().all()
    assert gradient[2, token_id[2]] > 0


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_a_shard_writes_its_columns_of_the_gradient(implementation):
    logits, token_id, shard = _case(4, 95, torch.float32)
    members = torch.arange(100, device=DEVICE) % 4 == 0
    whole = torch.empty_like(logits)
    rows = TokenRows(logits, token_id, members, shard)
    out = evaluate_token_likelihood(rows, implementation=implementation)
    weights = torch.rand(2, 4).to(DEVICE)
    write_likelihood_gradient(rows, out, *weights, whole, implementation=implementation)
    for start in (0, 50):
        cut = slice(start, start + 50)
        part = VocabShard(start=start, stop=start + 50, vocab_size=95)
        own = TokenRows(logits[:, cut], token_id, members[cut], part)
        known = out._replace(column=local_column(token_id, part))
        gradient = torch.empty_like(logits[:, cut])
        write_likelihood_gradient(own, known, *weights, gradient, implementation=implementation)
        assert torch.equal(gradient, whole[:, cut])

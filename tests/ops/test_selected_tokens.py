"""Log-probabilities of selected tokens beside those of all others together."""

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.selected_tokens import (
    evaluate_selected_tokens,
    selected_log_prob_reference,
    write_selected_gradient,
)
from megatron_ext.ops.top_columns import top_columns
from tests.ops.kernel_case import ALL_THREE, DEVICE, DTYPES, assert_as_exact, combinations, rounding

pytest.importorskip("triton")


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


def test_a_tiny_rest_keeps_its_digits_in_fp32():
    logits = torch.tensor([[0.0, -30.0, -31.0, -40.0], [9e3, -1e3, -torch.inf, 8.9e3]])
    value = _selected(logits, torch.tensor([[0], [0]]), _shard(4))
    truth = torch.logsumexp(torch.tensor([-30.0, -31.0, -40.0]).double(), dim=0).item()
    assert value[0, 1].item() == pytest.approx(truth, rel=1e-6)
    assert value[1].tolist() == pytest.approx([0.0, -100.0])


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
    excluded = shard.excluded_columns(logits.device, allowed)
    assert top_columns(logits, 4, shard, excluded).tolist() == [[2, 0, 3, -1], [0, 2, 3, -1]]
    assert top_columns(logits[:0], 3, shard).shape == (0, 3)


COMPILED = pytest.mark.parametrize("implementation", ["triton", "cpu"])


def compiled(*axes):
    """``combinations`` of the axes, of which the first are dtypes, by kernels and by loops."""
    cases = [(by, *case) for by in ("triton", "cpu") for case in combinations(*axes)]
    # The loops read no fp16.
    return [case for case in cases if case[:2] != ("cpu", torch.float16)]


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@pytest.mark.parametrize(
    ("implementation", "dtype", "size", "temperature", "in_place"),
    compiled(DTYPES, [(20_003, 64), (37, 36), (2, 1)], [1.0, 2.5, 1.0], [False, True, True]),
)
def test_values_and_gradient_are_the_references_in_logits_of_any_dtype(
    implementation, dtype, size, temperature, in_place
):
    logits, ids = _selection(vocab=size[0], k=size[1])
    # The selected tokens of some rows have most of the mass; one has a probability of 0 in fp32.
    logits[:4].scatter_add_(1, ids[:4].clamp(min=0), torch.full((4, size[1]), 9.0).double())
    logits[2, ids[2, 0]] = -300.0
    logits[5] = torch.nan
    logits = logits.to(dtype).to(DEVICE)
    weights = torch.rand(9, size[1] + 1, dtype=torch.float64)
    weights[4:6] = 0.0
    truths = []
    for exact in (torch.float32, torch.float64):
        reference = logits.to(exact).requires_grad_()
        truth = selected_log_prob_reference(reference, ids.to(DEVICE), temperature=temperature)
        named = (truth > -torch.inf) & weights.to(DEVICE).bool()
        on = weights.to(DEVICE, exact)[named]
        (grad,) = torch.autograd.grad(truth[named], reference, on)
        truths.append((truth.detach(), grad.nan_to_num(0.0)))
    padded = torch.nn.functional.pad(logits, (0, 3), value=80.0)
    value, grad = _selected(
        padded,
        ids.to(DEVICE),
        _shard(size[0], 3),
        weights.float().to(DEVICE),
        in_place=in_place,
        temperature=temperature,
        implementation=implementation,
    )
    finite = torch.arange(9) != 5
    same, exact = truths
    assert value[5].isnan().any()
    is_none = exact[0] == -torch.inf
    assert torch.equal(value == -torch.inf, is_none)
    values = [part.masked_fill(is_none, 0.0)[finite] for part in (value, same[0], exact[0])]
    assert_as_exact(*values, slack=2e-6)
    # What the selected ones leave, by its own size.
    assert_as_exact(*(part[:, -1].exp() for part in values), slack=2e-6)
    assert_as_exact(*(part[:4, -1].exp() for part in values), slack=2e-6)
    assert_as_exact(grad[:, :-3], same[1], exact[1], slack=2e-6 + rounding(dtype))
    assert not grad[:, -3:].any()
    assert not grad[4:6].any()


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_the_largest_column_is_the_first_of_equals(implementation, dtype, temperature):
    logits = torch.randn(6, 37).to(dtype)
    # Selected alone, not selected alone, and both, in either order; a masked row.
    for row, columns in enumerate(([5, 9], [20, 3], [5, 20], [3, 9])):
        logits[row, columns] = 8.0
    logits[4] = -torch.inf
    ids = torch.tensor([5, 9, 30, -1]).expand(6, 4).to(DEVICE)
    padded = torch.nn.functional.pad(logits, (0, 3), value=80.0).to(DEVICE)
    found = evaluate_selected_tokens(
        padded,
        ids,
        _shard(37, 3),
        temperature=temperature,
        with_top_column=True,
        implementation=implementation,
    )
    assert torch.equal(found.top_column.cpu(), logits.argmax(dim=-1))


@ALL_THREE
def test_a_row_without_a_gradient_is_not_looked_at_and_nothing_is_left_of_an_empty_rest(
    implementation,
):
    logits = torch.randn(2, 4)
    logits[1] = torch.nan
    ids = torch.arange(4).expand(2, 4)
    weights = torch.tensor([[1.0] * 5, [0.0] * 5])
    given = (part.to(DEVICE) for part in (logits, ids))
    value, grad = _selected(
        *given, _shard(4), weights.to(DEVICE), in_place=True, implementation=implementation
    )
    assert value[0, 4] == -torch.inf
    torch.testing.assert_close(value[0, :4].cpu(), torch.log_softmax(logits[0], dim=-1))
    torch.testing.assert_close(grad[0].cpu(), 1 - 4 * torch.softmax(logits[0], dim=-1))
    assert not grad[1].any()


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@pytest.mark.parametrize(
    ("implementation", "dtype", "k", "rows"), compiled(DTYPES, [1, 64, 2000], [7, 1, 7])
)
def test_the_top_columns_are_those_of_torch(implementation, dtype, k, rows, monkeypatch):
    # Several slices of rows by kernel.
    monkeypatch.setattr("megatron_ext.ops.top_columns._MOST_CANDIDATES", 5 * k)
    generator = torch.Generator().manual_seed(k)
    logits = (8 * torch.randn(7, 2503, generator=generator)).round() / 8
    logits[1] = 0.0
    logits[1, ::3] = -0.0
    logits[2, 5:] = -torch.inf
    # Numbers whose exponentials are equal: far below one that is not allowed, and close together.
    logits[3] = logits[3] - 300.0
    logits[3, 1] = 9.0
    logits[4] = torch.arange(2503).flip(0) * 1e-9
    logits[5] = torch.nan
    logits[6, [7, 300, 1200]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    logits = logits[:rows].to(dtype).to(DEVICE)
    shard = VocabShard(start=10000, stop=12503, vocab_size=12500)
    allowed = (torch.arange(2503) % 4 != 1).to(DEVICE)
    for given in (None, shard.excluded_columns(logits.device, allowed)):
        found, by_torch = (
            top_columns(logits, k, shard, given, implementation=by)
            for by in (implementation, "torch")
        )
        assert torch.equal(found, by_torch)


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize("size", [(20_003, 64), (37, 5), (37, 1), (3, 3)])
@pytest.mark.parametrize("scale", [0.7, torch.tensor(0.7)], ids=["number", "tensor"])
def test_cross_entropy_rides_along(implementation, size, scale):
    vocab, k = size
    logits, ids = _selection(vocab=vocab, k=k)
    labels = torch.randint(0, vocab, (9,))
    # Among the tokens, at either end; none; one beyond the vocabulary; one that has no mass.
    labels[:4] = torch.stack([ids[0, 0], ids[2, -1], torch.tensor(-100), torch.tensor(vocab)])
    logits[5, labels[5]] = -torch.inf
    weights = torch.rand(9, k + 2, dtype=torch.float64)
    reference = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(reference, dim=-1)
    losses = -log_probs.gather(1, labels.clamp(0, vocab - 1)[:, None])[:, 0]
    is_apart = (ids != labels[:, None]).all(dim=1) & (labels >= 0) & (labels < vocab)
    asked = torch.cat([ids, torch.where(is_apart, labels, -1)[:, None]], dim=1)
    truth = selected_log_prob_reference(reference, asked)
    named = truth > -torch.inf
    counted = (labels >= 0) & (labels < vocab) & losses.detach().isfinite()
    total = (truth[named] * weights[named]).sum() + 0.7 * losses[counted].sum()
    (true_grad,) = torch.autograd.grad(total, reference)
    given = [part.to(DEVICE) for part in (logits.float(), ids, labels)]
    # Of a batch of one, labels can have gaps.
    given[2] = torch.stack([given[2], given[2] + 1], dim=1)[:, 0]
    on = scale.to(DEVICE) if isinstance(scale, torch.Tensor) else scale
    options = {"labels": given[2], "implementation": implementation}
    shard = _shard(vocab)
    found = evaluate_selected_tokens(*given[:2], shard, **options)
    gradient = torch.full_like(given[0], torch.nan)
    write_selected_gradient(
        given[0], found, weights.float().to(DEVICE), shard, gradient, label_scale=on, **options
    )
    places = torch.where(is_apart | (labels < 0) | (labels >= vocab), k, 0)
    hits = (ids == labels[:, None]) & (labels[:, None] >= 0)
    places = torch.where(hits.any(dim=1), hits.int().argmax(dim=1), places)
    assert torch.equal(found.place.cpu(), places)
    loss = found.token_loss.cpu().double()
    assert loss[2] == 0.0
    assert loss[3].isnan()
    rest = torch.arange(9)
    has_loss = (rest != 2) & (rest != 3)
    torch.testing.assert_close(loss[has_loss], losses.detach()[has_loss], rtol=1e-5, atol=1e-5)
    assert loss[5] == torch.inf
    assert gradient.isfinite().all()
    # The reference of the row that has a token without mass is the logarithm of 0.
    got = gradient.cpu().double()[rest != 5]
    torch.testing.assert_close(got, true_grad[rest != 5], rtol=1e-4, atol=3e-6)


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@COMPILED
@pytest.mark.parametrize("start", [0, 20])
def test_a_shard_has_the_tokens_of_its_own_columns(implementation, start):
    """One rank's part, as it is before the ranks have met."""
    logits, ids = _selection()
    labels = torch.randint(0, 37, (9,))
    shard = VocabShard(start=start, stop=start + 20, vocab_size=37)
    own = torch.nn.functional.pad(logits, (0, 3), value=80.0)[:, start : start + 20].float()
    found = []
    for by in (implementation, "torch"):
        given = [part.to(DEVICE) for part in (own, ids, labels)]
        out = evaluate_selected_tokens(*given[:2], shard, labels=given[2], implementation=by)
        gradient, on = torch.full_like(given[0], torch.nan), torch.ones_like(out.log_prob)
        write_selected_gradient(
            given[0], out, on, shard, gradient, labels=given[2], implementation=by
        )
        found.append((out, gradient))
    (out, gradient), (truth, true_gradient) = found
    assert torch.equal(out.column, truth.column)
    assert torch.equal(out.place, truth.place)
    # What another rank has counts as a logit of 0 here.
    torch.testing.assert_close(out.log_prob, truth.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-4, atol=1e-5)

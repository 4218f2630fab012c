"""Tiles through the head give the loss and the gradients of whole logits. T rows, D hidden."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.errors import LossError
from megatron_ext.ops.linear_form import linear_loss
from megatron_ext.ops.tile_plan import TilePlan
from tests.ops.allocation_record import AllocationRecord
from tests.ops.kernel_case import assert_as_exact

WIDTH, HIDDEN = 37, 8


@dataclass(frozen=True, kw_only=True)
class Model:
    """Hidden states, head and targets; ``loss`` is a cross-entropy with a weight a row."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    label: torch.Tensor
    row_weight: torch.Tensor

    @classmethod
    def random(cls, rows=23, *, dtype=torch.float32):
        generator = torch.Generator().manual_seed(rows)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

        return cls(
            hidden=normal(rows, HIDDEN),
            weight=normal(WIDTH, HIDDEN),
            bias=normal(WIDTH),
            label=torch.randint(0, WIDTH, (rows,), generator=generator),
            row_weight=torch.rand(rows, generator=generator),
        )

    def to(self, dtype):
        hidden, weight, bias = (
            None if leaf is None else leaf.detach().to(dtype).requires_grad_()
            for leaf in (self.hidden, self.weight, self.bias)
        )
        return replace(self, hidden=hidden, weight=weight, bias=bias)

    def leaves(self):
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]

    def whole(self, rows=None):
        """Loss and gradients by logits that are whole."""
        logits = self.hidden @ self.weight.t()
        logits = logits if self.bias is None else logits + self.bias
        kept = torch.arange(len(logits)) if rows is None else rows
        loss = _cross_entropy(logits[kept], self.label[kept], self.row_weight[kept])
        return [loss.detach(), *torch.autograd.grad(loss, self.leaves())]

    def tiled(self, plan, factor=1.0):
        loss = linear_loss(self.hidden, self.weight, InPlace(self, plan), plan, bias=self.bias)
        return [loss.detach(), *torch.autograd.grad(factor * loss, self.leaves())]


class InPlace:
    """The same cross-entropy of a tile, whose gradient overwrites the logits."""

    def __init__(self, model, plan):
        self.model, self.plan, self.calls = model, plan, 0

    def __call__(self, tile, logits, *, needs_gradient):
        self.calls += 1
        rows = self.plan.student_index(tile)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_(needs_gradient)
            loss = _cross_entropy(leaf, self.model.label[rows], self.model.row_weight[rows])
        if not needs_gradient:
            return loss, None
        return loss.detach(), logits.copy_(torch.autograd.grad(loss, leaf)[0])


def _cross_entropy(logits, label, weight):
    wide = logits if logits.dtype == torch.float64 else logits.float()
    picked = torch.log_softmax(wide, dim=-1).gather(-1, label[:, None])[:, 0]
    return -(picked * weight).sum()


def _plan(rows, tile):
    return TilePlan.paired(torch.ones(rows, dtype=torch.bool), rows=tile)


@pytest.mark.parametrize("tile", [1, 5, 23, 100])
def test_loss_and_gradients_are_those_of_whole_logits(tile):
    model = Model.random(dtype=torch.float64)
    for got, truth in zip(model.tiled(_plan(23, tile)), model.whole(), strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_lower_precision_is_no_further_from_the_truth_than_torch(dtype, with_bias):
    model = Model.random(64, dtype=dtype)
    model = model if with_bias else replace(model, bias=None)
    got = model.tiled(_plan(64, 7))
    same, truth = model.whole(), model.to(torch.float64).whole()
    for one, other, exact in zip(got, same, truth, strict=True):
        # The sum of tiles is rounded once, as torch's; sums in another order differ by less.
        assert_as_exact(one, other, exact, slack=torch.finfo(dtype).eps)


def test_many_tiles_lose_no_bits_of_the_head():
    model = Model.random(512, dtype=torch.bfloat16)
    truth = model.to(torch.float64).whole()[2]
    errors = [(model.tiled(_plan(512, tile))[2].double() - truth).abs().max() for tile in (1, 512)]
    assert errors[0] <= 1.5 * errors[1]


def test_rows_in_no_tile_cost_and_get_nothing():
    model = Model.random()
    used = torch.arange(23) % 3 != 0
    plan = TilePlan.paired(used, rows=4)
    with torch.no_grad():
        model.hidden[~used] = torch.nan
    got = model.tiled(plan)
    assert (got[1][~used] == 0).all()
    clean = replace(model, hidden=model.hidden.detach().nan_to_num().requires_grad_())
    for one, other in zip(got, clean.whole(used.nonzero()[:, 0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_an_upstream_gradient_multiplies():
    model, plan = Model.random(), _plan(23, 6)
    once, thrice = model.tiled(plan), model.tiled(plan, 3.0)
    for one, three in zip(once[1:], thrice[1:], strict=True):
        torch.testing.assert_close(3 * one, three)


def test_backward_can_run_twice():
    model, plan = Model.random(), _plan(23, 6)
    loss = linear_loss(model.hidden, model.weight, InPlace(model, plan), plan, bias=model.bias)
    first = torch.autograd.grad(2 * loss, model.leaves(), retain_graph=True)
    second = torch.autograd.grad(loss, model.leaves())
    for two, one in zip(first, second, strict=True):
        torch.testing.assert_close(two, 2 * one)


def test_nothing_is_computed_for_what_needs_no_gradient():
    model, plan = Model.random(), _plan(23, 6)
    whole = model.whole()
    for frozen in range(3):
        leaves = [leaf.detach() for leaf in model.leaves()]
        wanted = [leaf for index, leaf in enumerate(leaves) if index != frozen]
        for leaf in wanted:
            leaf.requires_grad_()
        loss = linear_loss(leaves[0], leaves[1], InPlace(model, plan), plan, bias=leaves[2])
        found = torch.autograd.grad(loss, wanted)
        truth = [part for index, part in enumerate(whole[1:]) if index != frozen]
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other)


def test_without_grad_mode_the_loss_makes_no_gradient():
    model, plan = Model.random(), _plan(23, 6)
    seen = []
    inner = InPlace(model, plan)

    def spy(tile, logits, *, needs_gradient):
        seen.append(needs_gradient)
        return inner(tile, logits, needs_gradient=needs_gradient)

    with torch.no_grad():
        loss = linear_loss(model.hidden, model.weight, spy, plan, bias=model.bias)
    assert not loss.requires_grad
    assert seen == [False] * 4
    torch.testing.assert_close(loss, model.whole()[0])


def test_no_tile_gives_zero_with_a_graph():
    model = Model.random()
    plan = TilePlan.paired(torch.zeros(23, dtype=torch.bool), rows=4)
    loss, *gradients = model.tiled(plan)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)


class TestMainGrad:
    """What megatron-core's fused accumulation does in its backward, done in the forward."""

    def _loss(self, model):
        plan = _plan(23, 6)
        model.weight.main_grad = torch.ones(WIDTH, HIDDEN)
        loss = InPlace(model, plan)
        return linear_loss(
            model.hidden, model.weight, loss, plan, bias=model.bias, into_main_grad=True
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_the_heads_gradient_is_added_to_main_grad(self, dtype):
        model = Model.random(dtype=dtype)
        self._loss(model).backward()
        truth = model.to(torch.float64).whole()[2]
        slack = 4 * torch.finfo(dtype).eps * float(truth.abs().max())
        added = model.weight.main_grad - 1
        torch.testing.assert_close(added.double(), truth, rtol=0, atol=slack)
        assert model.weight.grad is None

    def test_megatron_cores_hooks_run(self):
        model = Model.random()
        model.weight.grad_added_to_main_grad = False
        model.weight.zero_out_wgrad = True
        ran = []
        model.weight.register_post_accumulate_grad_hook(
            lambda weight: ran.append(weight.grad_added_to_main_grad)
        )
        self._loss(model).backward()
        assert ran == [True]
        assert (model.weight.grad == 0).all()

    def test_another_upstream_gradient_is_refused(self):
        loss = 2 * self._loss(Model.random())
        with pytest.raises(LossError, match="upstream gradient 1"):
            loss.backward()

    def test_a_weight_without_one_is_refused(self):
        model, plan = Model.random(), _plan(23, 6)
        with pytest.raises(LossError, match="main_grad"):
            linear_loss(model.hidden, model.weight, InPlace(model, plan), plan, into_main_grad=True)


def test_the_peak_is_one_tile_and_the_gradients(monkeypatch):
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 1 << 12)
    rows, width, hidden, tile = 256, 512, 16, 32
    states = torch.randn(rows, hidden).bfloat16().requires_grad_()
    head = torch.randn(width, hidden).bfloat16().requires_grad_()

    def halved(tile, logits, *, needs_gradient):
        return logits[0, 0].float(), logits.mul_(0.5)

    with AllocationRecord() as record:
        linear_loss(states, head, halved, _plan(rows, tile)).backward()
    record.assert_no_wide_tensor(rows=tile, columns=width)
    gradients = 2 * rows * hidden + (4 + 2) * width * hidden
    # Slices of 4,096 elements, the widened hidden states of a tile and their gradient.
    rest = 4 * 4 * 4096 + 8 * tile * hidden
    assert record.peak_bytes <= 2 * tile * width + gradients + rest


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden": torch.zeros(22, HIDDEN)}, "tile plan"),
        ({"hidden": torch.zeros(23, HIDDEN + 1)}, "do not fit the head"),
        ({"hidden": torch.zeros(23, HIDDEN, dtype=torch.float16)}, "dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change, match):
    model, plan = Model.random(), _plan(23, 6)
    given = SimpleNamespace(**({"hidden": model.hidden} | change))
    with pytest.raises(LossError, match=match):
        linear_loss(given.hidden, model.weight, InPlace(model, plan), plan)

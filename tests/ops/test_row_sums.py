"""Rows times what arrives for them, and sums of rows by index."""

import pytest
import torch

from megatron_ext.ops.chunk_rows import index_sum
from megatron_ext.ops.unit_gradient import kept_gradient, scale_rows_, transfer
from tests.ops.kernel_case import BOTH, DEVICE, DTYPES, rounding

pytest.importorskip("triton")


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_scaled_and_rounded_once(implementation, dtype):
    gradient = torch.randn(4, 9001, device=DEVICE).to(dtype)
    gradient[2] = torch.nan
    scale = torch.tensor([1.0, 0.3, 0.0, -2.0], device=DEVICE)
    expected = gradient.double() * scale[:, None]
    untouched = gradient[0].clone()
    out = scale_rows_(gradient, scale, implementation)
    assert out is gradient
    assert torch.equal(out[0], untouched)
    assert not out[2].any()
    scaled = [1, 3]
    torch.testing.assert_close(
        out.double()[scaled], expected[scaled], rtol=1.001 * rounding(dtype), atol=1e-7
    )


@BOTH
def test_rows_of_scale_0_are_left_alone(implementation):
    gradient = torch.tensor([[1.0, 2.0], [7.0, 7.0], [3.0, 4.0]], device=DEVICE)
    grad_scale = torch.tensor([1.0, 0.0, 0.5], device=DEVICE)
    grad = torch.tensor([1.0, 3.0, 1.0], device=DEVICE)
    out = transfer(gradient, grad, grad_scale, implementation=implementation)
    # A forward writes 0 there; the mark shows that nobody came by.
    assert out.tolist() == [[1.0, 2.0], [7.0, 7.0], [6.0, 8.0]]


@BOTH
@pytest.mark.parametrize("grad_scale", [None, 0.5, "each"])
def test_rows_take_what_arrives_for_their_chunk_over_what_they_were_written_for(
    implementation, grad_scale
):
    gradient = torch.randn(6, 9001, device=DEVICE)
    before = gradient.clone()
    grad = torch.tensor([1.0, 3.0, 0.5, 2.0], device=DEVICE)
    slots = torch.tensor([3, -1, 0, 2, 4, 1], device=DEVICE)
    scale = torch.full((4,), 0.5 if grad_scale else 1.0, device=DEVICE)
    if grad_scale == "each":
        scale[1], grad_scale = 0.0, scale
    out = transfer(gradient, grad, grad_scale, slots=slots, implementation=implementation)
    ratio = torch.where(scale == 0, 1.0, grad / scale)
    factors = torch.cat([ratio, ratio.new_ones(2)])[slots.where(slots >= 0, 4)]
    torch.testing.assert_close(out, before * factors[:, None])


def test_without_grad_mode_nothing_is_written_over():
    logits = torch.randn(4, 6, requires_grad=True)
    before = logits.detach().clone()

    def evaluate(rows, gradient):
        assert gradient is None
        return (torch.ones(2),)

    with torch.no_grad():
        (loss,) = kept_gradient(logits, evaluate, slots=torch.tensor([0, 0, 1, 2]), in_place=True)
    assert not loss.requires_grad
    assert torch.equal(logits, before)


def test_sums_and_gradient_are_those_of_index_add():
    values = torch.randn(50, device=DEVICE, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 7, (50,), device=DEVICE)
    weight = torch.randn(9, device=DEVICE, dtype=torch.float64)
    sums = index_sum(values, index, 9)
    expected = torch.zeros_like(weight).index_add(0, index, values.detach())
    torch.testing.assert_close(sums.detach(), expected)
    (gradient,) = torch.autograd.grad(sums, values, weight)
    assert torch.equal(gradient, weight[index])
    assert index_sum(values[:0], index[:0], 0).shape == (0,)


def test_sums_are_the_same_each_time():
    values = torch.randn(20_000, device=DEVICE)
    index = torch.randint(0, 3, (20_000,), device=DEVICE)
    first = index_sum(values, index, 3)
    assert all(torch.equal(first, index_sum(values, index, 3)) for _ in range(10))

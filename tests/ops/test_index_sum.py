"""Sums by index, their gradient, and that a GPU repeats them bit by bit."""

from __future__ import annotations

import torch

from megatron_ext.ops.chunk_rows import index_sum
from tests.ops.kernel_case import DEVICE


def test_sums_and_gradient_are_those_of_index_add() -> None:
    values = torch.randn(50, device=DEVICE, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 7, (50,), device=DEVICE)
    weight = torch.randn(9, device=DEVICE, dtype=torch.float64)
    sums = index_sum(values, index, 9)
    expected = torch.zeros_like(weight).index_add(0, index, values.detach())
    torch.testing.assert_close(sums.detach(), expected)
    (gradient,) = torch.autograd.grad(sums, values, weight)
    assert torch.equal(gradient, weight[index])
    assert index_sum(values[:0], index[:0], 0).shape == (0,)


def test_sums_are_the_same_each_time() -> None:
    values = torch.randn(20_000, device=DEVICE)
    index = torch.randint(0, 3, (20_000,), device=DEVICE)
    first = index_sum(values, index, 3)
    assert all(torch.equal(first, index_sum(values, index, 3)) for _ in range(10))

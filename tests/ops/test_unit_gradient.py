"""Rows times what arrives for them."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.unit_gradient import kept_gradient, scale_rows_, transfer
from tests.ops.kernel_case import DEVICE, DTYPES, rounding

pytest.importorskip("triton")


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_scaled_and_rounded_once(
    implementation: Implementation, dtype: torch.dtype
) -> None:
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


@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_rows_of_scale_0_are_left_alone(implementation: Implementation) -> None:
    gradient = torch.tensor([[1.0, 2.0], [7.0, 7.0], [3.0, 4.0]], device=DEVICE)
    grad_scale = torch.tensor([1.0, 0.0, 0.5], device=DEVICE)
    grad = torch.tensor([1.0, 3.0, 1.0], device=DEVICE)
    out = transfer(gradient, grad, grad_scale, implementation=implementation)
    # A forward writes 0 there; the mark shows that nobody came by.
    assert out.tolist() == [[1.0, 2.0], [7.0, 7.0], [6.0, 8.0]]


def test_without_grad_mode_nothing_is_written_over() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    before = logits.detach().clone()

    def evaluate(rows: torch.Tensor, gradient: torch.Tensor | None) -> tuple[torch.Tensor]:
        assert gradient is None
        return (torch.ones(2),)

    with torch.no_grad():
        (loss,) = kept_gradient(logits, evaluate, slots=torch.tensor([0, 0, 1, 2]), in_place=True)
    assert not loss.requires_grad
    assert torch.equal(logits, before)

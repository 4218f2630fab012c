"""Norms of gradients on one rank; ``tests/distributed/test_combined.py`` has several."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.gradient_magnitude import LayerGradients


def terms(weight: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden = x @ weight
    return {"kd": hidden.square().sum(), "ce": hidden.tanh().sum()}


def test_norms_are_those_of_the_sum_over_microbatches_and_leave_no_gradient_behind() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, generator=generator, requires_grad=True)
    unused = torch.randn(2, 2, requires_grad=True)
    parts = [torch.randn(5, 4, generator=generator) for _ in range(3)]
    measured = LayerGradients([weight, unused], ("kd", "ce"))
    for _ in range(2):
        # The second time shows that it began anew.
        for part in parts:
            measured.add(terms(weight, part))
        norms = measured.norms()
        for name, norm in norms.items():
            whole = terms(weight, torch.cat(parts))[name]
            (truth,) = torch.autograd.grad(whole, weight)
            assert norm == pytest.approx(truth.norm().item(), rel=1e-6)
    assert weight.grad is None


def test_the_graph_is_kept_for_the_backward_pass() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    found = terms(weight, torch.ones(1, 2))
    LayerGradients([weight], ("kd", "ce")).add(found)
    (found["kd"] + found["ce"]).backward()
    assert weight.grad is not None


def test_parameters_that_cannot_be_measured_are_refused() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    with pytest.raises(LossError, match="need a parameter"):
        LayerGradients([], ("kd",))
    with pytest.raises(LossError, match=r"kd: no parameter .* leads to a term"):
        LayerGradients([other], ("kd",)).add({"kd": weight.sum()})
    other.sequence_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(LossError, match="partial gradient"):
        LayerGradients([other], ("kd",))

"""Divergences of distributions."""

import math

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.ops.divergence import (
    check_divergence,
    divergence,
    divergence_reference,
    divergence_terms,
    log1mexp,
)
from tests.ops.kernel_case import DIRECTIONS


def _logits(seed):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("mixture", [0.5, 0.1, 0.9])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_value_and_gradient_equal_the_references(direction, mixture):
    student, teacher = _logits(0).requires_grad_(), _logits(1)
    log_p = torch.log_softmax(teacher, dim=-1)
    value = divergence(log_p, torch.log_softmax(student, dim=-1), direction, mixture)
    truth = divergence_reference(
        log_p.exp(), torch.softmax(student, dim=-1), direction=direction, mixture=mixture
    )
    torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-14)
    weights = torch.rand(5, dtype=torch.float64)
    grads = [torch.autograd.grad((v * weights).sum(), student)[0] for v in (value, truth)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-13)


def test_a_case_worked_by_hand():
    p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.25, 0.75]).double()
    mix = (0.375, 0.625)
    js = 0.5 * (
        0.5 * math.log(0.5 / mix[0])
        + 0.5 * math.log(0.5 / mix[1])
        + 0.25 * math.log(0.25 / mix[0])
        + 0.75 * math.log(0.75 / mix[1])
    )
    values = [divergence(p.log(), q.log(), direction).item() for direction in DIRECTIONS]
    forward = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    reverse = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert values == pytest.approx([forward, reverse, js], rel=1e-14)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_entries_of_one_model_alone_cost_a_finite_amount_and_masked_ones_do_not_move(direction):
    inf = torch.inf
    log_p = torch.tensor([[0.0, -inf, -inf, -0.7]])
    log_q = torch.tensor([[-inf, 0.0, -inf, -2e4]])
    value, slope = divergence_terms(log_p, log_q, direction)
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert value[0, 2] == 0.0
    assert (slope[0, 0], slope[0, 2]) == (0.0, 0.0)
    tiny = math.log(torch.finfo(torch.float32).tiny)
    if direction == "forward":
        assert value[0, 0].item() == pytest.approx(-tiny)
        assert value[0, 3].item() == pytest.approx(math.exp(-0.7) * (2e4 - 0.7))
    elif direction == "reverse":
        assert value[0, 1].item() == pytest.approx(-tiny)


def test_the_jensen_shannon_divergence_of_strangers_is_log_two():
    log_p, log_q = torch.tensor([0.0, -torch.inf]), torch.tensor([-torch.inf, 0.0])
    assert divergence(log_p, log_q, "jensen_shannon").item() == pytest.approx(math.log(2))


def test_log1mexp_is_exact_at_both_ends():
    x = torch.tensor([-1e-30, -1e-8, -0.1, -0.6931, -0.6932, -5.0, -80.0])
    exact = x.double()
    truth = torch.where(
        exact > -0.69, torch.log(-torch.expm1(exact)), torch.log1p(-torch.exp(exact))
    )
    torch.testing.assert_close(log1mexp(x).double(), truth, rtol=3e-7, atol=0)
    assert log1mexp(torch.tensor([0.0, 1e-7])).tolist() == [-math.inf, -math.inf]


def test_log1mexp_has_its_derivative_and_none_where_it_is_infinite():
    x = torch.tensor([-1e-3, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log1mexp, x)
    edge = torch.tensor([0.0, 1e-7, -200.0], requires_grad=True)
    (grad,) = torch.autograd.grad(log1mexp(edge).masked_fill(edge >= 0, 0.0).sum(), edge)
    assert grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature of gold must be positive; got 0.0"),
        ({"direction": "both"}, "unknown direction of gold; got 'both'; expected one of forward"),
        ({"mixture": 1.0}, "mixture of gold must leave weight to both models; got 1.0"),
    ],
    ids=["temperature", "direction", "mixture"],
)
def test_options_that_mean_nothing_are_refused(options, message):
    good = {"temperature": 1.0, "direction": "forward", "mixture": 0.5}
    with pytest.raises(LossError, match=message):
        check_divergence("gold", **(good | options))

"""Divergences of distributions, and of two likelihoods."""

import math
from typing import get_args

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.ops.divergence import (
    Difference,
    binary_divergence,
    check_binary_divergence,
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


ALL = get_args(Difference)
PROPER = [name for name in ALL if name != "binary_ce"]
COIN, ALPHA = 0.01, 0.7


def definition(name, a, b, tau):
    """Straight from probabilities, in Python floats."""
    a, b = a - COIN, b - COIN
    p, q = math.exp(a / tau), math.exp(b / tau)
    ratio = (a - b) / tau
    return {
        "binary_kl": lambda: p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)),
        "binary_ce": lambda: -p * math.log(q) - (1 - p) * math.log(1 - q),
        "reverse_binary_kl": lambda: q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)),
        "binary_kl_temp_limit": lambda: (a - b) + a * math.log(-b) - a * math.log(-a),
        "abs": lambda: abs(a - b),
        "abs_exp": lambda: abs(p - q),
        "renyi": lambda: (
            math.log(p**ALPHA * q ** (1 - ALPHA) + (1 - p) ** ALPHA * (1 - q) ** (1 - ALPHA))
            / (ALPHA - 1)
        ),
        "joschu_k2": lambda: ratio**2 / 2,
        "joschu_k3": lambda: math.exp(ratio) - 1 - ratio,
    }[name]()


@pytest.mark.parametrize("tau", [1.0, 5.0, 100.0])
@pytest.mark.parametrize("name", ALL)
def test_values_and_slopes_are_those_of_the_definition(name, tau):
    pairs = [(-3.0, -0.2), (-0.2, -3.0), (-5.0, -5.5), (-1e-3, -2e-3), (-9.0, -4.0)]
    teacher, student = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    student.requires_grad_()
    value = binary_divergence(
        teacher, student, difference=name, temperature=tau, coin=COIN, renyi_alpha=ALPHA
    )
    (slope,) = torch.autograd.grad(value.sum(), student)
    for index, (a, b) in enumerate(pairs):
        assert value[index].item() == pytest.approx(definition(name, a, b, tau), rel=1e-7)
        step = 1e-6
        sides = [definition(name, a, b + sign * step, tau) for sign in (1, -1)]
        expected = (sides[0] - sides[1]) / (2 * step)
        assert slope[index].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("nats", [0.0, -1e-6, -0.7, -50.0, -1e4])
@pytest.mark.parametrize("name", PROPER)
def test_equal_likelihoods_differ_by_nothing(name, nats):
    student = torch.tensor([nats], requires_grad=True)
    value = binary_divergence(student.detach(), student, difference=name)
    (slope,) = torch.autograd.grad(value.sum(), student)
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert slope.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["abs", "abs_exp"])
def test_a_slope_that_jumps_does_not_at_a_rounding_difference(name, dtype):
    nats = torch.tensor([0.0, -1e-6, -0.7, -50.0], dtype=dtype)
    # Logarithms of sums of many terms are off by some units of their own size, or of 1.
    unit = torch.finfo(dtype).eps * (1 + nats.abs())
    off = torch.cat([nats - 50 * unit, (nats + 50 * unit).clamp(max=0)]).requires_grad_()
    value = binary_divergence(nats.repeat(2), off, difference=name)
    (slope,) = torch.autograd.grad(value.sum(), off)
    assert not value.any()
    assert not slope.any()
    apart = (nats - 1000 * unit).requires_grad_()
    value = binary_divergence(nats, apart, difference=name)
    (slope,) = torch.autograd.grad(value.sum(), apart)
    assert (value > 0).all()
    assert (slope < 0).all()


@pytest.mark.parametrize(("tau", "entropy"), [(1.0, 0.040), (5.0, 0.658), (100.0, 0.195)])
def test_cross_entropy_of_equal_likelihoods_is_their_entropy_without_a_slope(tau, entropy):
    """The self-loss of tokenkit's ``binary_ce`` at -5 nats."""
    student = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
    value = binary_divergence(
        student.detach(), student, difference="binary_ce", temperature=tau, coin=1e-6 * tau
    )
    (slope,) = torch.autograd.grad(value.sum(), student)
    assert value.item() == pytest.approx(entropy, abs=1e-3)
    assert slope.item() == pytest.approx(0.0, abs=1e-12)


def test_the_coin_of_tokenkit_gives_its_spike():
    teacher = torch.tensor([-3.0], dtype=torch.float64)
    student = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    value = binary_divergence(teacher, student, temperature=100.0, coin=1e-4)
    (slope,) = torch.autograd.grad(value.sum(), student)
    assert slope.item() == pytest.approx(295, abs=1)


@pytest.mark.parametrize("name", ALL)
def test_every_pair_of_likelihoods_has_a_finite_value_and_slope(name):
    nats = torch.tensor([0.0, -1e-7, -1e-3, -1.0, -80.0, -1e4, -1e6])
    teacher, student = (grid.flatten() for grid in torch.meshgrid(nats, nats, indexing="ij"))
    student.requires_grad_()
    for tau in (0.5, 1.0, 100.0):
        value = binary_divergence(teacher, student, difference=name, temperature=tau)
        (slope,) = torch.autograd.grad(value.sum(), student)
        assert value.isfinite().all()
        assert slope.isfinite().all()


@pytest.mark.parametrize("tau", [1.0, 5.0, 100.0])
@pytest.mark.parametrize("name", ["binary_kl", "binary_ce"])
def test_a_student_that_is_certain_has_a_slope_within_the_stated_bound(name, tau):
    teacher = torch.tensor([-3.0, -1e4])
    student = torch.zeros(2, requires_grad=True)
    value = binary_divergence(teacher, student, difference=name, temperature=tau, coin=COIN)
    (slope,) = torch.autograd.grad(value.sum(), student)
    bound = 1 / (tau * -math.expm1(-COIN / tau))
    assert (slope > 0).all()
    assert (slope <= bound * (1 + 1e-5)).all()
    if tau == 100.0:
        # Where 1e-6 after the temperature gives 295.
        assert slope[0].item() == pytest.approx(2.95, abs=0.01)


def test_the_limit_is_that_of_binary_kl_at_a_high_temperature():
    teacher, student = torch.tensor([-3.0], dtype=torch.float64), torch.tensor([-1.0]).double()
    limit = binary_divergence(teacher, student, difference="binary_kl_temp_limit")
    tempered = 1e6 * binary_divergence(teacher, student, temperature=1e6)
    assert tempered.item() == pytest.approx(limit.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"difference": "kl"}, "unknown difference of the objective alm; got 'kl'"),
        ({"temperature": 0.0}, "the temperature of the objective alm must be positive; got 0.0"),
        ({"coin": math.inf}, "the coin of the objective alm must be positive; got inf"),
        ({"renyi_alpha": 1.0}, "no Renyi divergence of this order; got 1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_of_a_binary_divergence_that_mean_nothing_are_refused(wrong, message):
    options = {"difference": "abs", "temperature": 1.0, "coin": 0.1, "renyi_alpha": 0.5}
    with pytest.raises(LossError, match=message):
        check_binary_divergence("alm", **(options | wrong))

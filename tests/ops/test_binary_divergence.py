"""Differences of two likelihoods of an event, and the kernel that compares many."""

import math
from typing import get_args

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.ops.binary_divergence import (
    LARGEST_LOG_RATIO,
    BinaryOptions,
    Difference,
    binary_divergence,
    check_binary_divergence,
    compare_events,
)
from tests.ops.kernel_case import BOTH, DEVICE

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


@pytest.mark.parametrize("name", ALL)
def test_a_certain_event_has_the_slope_of_one_that_nearly_is(name):
    options, everything = BinaryOptions(name, 1.0, COIN, ALPHA), torch.ones(2).bool()
    teacher, student = torch.tensor([-2.0, -2.0]), torch.tensor([0.0, -1e-6])
    _, (certain, nearly) = _compared(teacher, student, everything, options, "torch")
    assert certain.item() == pytest.approx(nearly.item(), rel=1e-3)


def test_the_slope_of_joschu_k3_does_not_jump_where_its_value_becomes_a_line():
    student = torch.tensor([-LARGEST_LOG_RATIO, -LARGEST_LOG_RATIO - 1]).double().requires_grad_()
    values = binary_divergence(
        torch.zeros(2).double(), student, difference="joschu_k3", temperature=1.0, coin=0.0
    )
    (slopes,) = torch.autograd.grad(values.sum(), student)
    assert torch.equal(slopes, torch.full_like(slopes, -math.expm1(LARGEST_LOG_RATIO)))


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


KINDS = {
    "far apart": slice(0, 40),
    "nearly equal": slice(40, 80),
    "equal": slice(80, 90),
    "certain": slice(90, 96),
    "impossible": slice(96, 99),
}


def _pairs():
    """Nats of events of ``KINDS`` for both models."""
    generator = torch.Generator().manual_seed(3)
    teacher, student = -20 * torch.rand(2, 99, generator=generator) ** 3
    student[40:80] = teacher[40:80] * (1 + 0.01 * torch.randn(40, generator=generator))
    student[80:90] = teacher[80:90]
    teacher[90:93], student[93:96] = 0.0, 0.0
    teacher[96:98], student[97:99] = -1e4, -1e4
    return teacher.to(DEVICE), student.to(DEVICE)


def _compared(teacher, student, compared, options, implementation):
    own = student.clone().requires_grad_()
    events = compare_events(teacher, own, compared, options, implementation=implementation)
    (slope,) = torch.autograd.grad(events.loss.where(events.kept, 0.0).sum(), own)
    return events, slope


@pytest.mark.parametrize("tau", [1.0, 5.0, 100.0])
@pytest.mark.parametrize("name", ALL)
def test_events_are_compared_as_exactly_as_by_torch(name, tau):
    pytest.importorskip("triton")
    teacher, student = _pairs()
    options, everything = BinaryOptions(name, tau, COIN, ALPHA), torch.ones_like(teacher).bool()
    exact, double = _compared(teacher.double(), student.double(), everything, options, "torch")
    same, single = _compared(teacher, student, everything, options, "torch")
    got, slope = _compared(teacher, student, everything, options, "triton")
    assert got.kept.all()
    assert torch.equal(got.student_nats, -student)
    assert torch.equal(got.teacher_nats, -teacher)
    for its in KINDS.values():
        losses = [events.loss.detach()[its].double() for events in (got, same, exact)]
        slopes = [part[its].double() for part in (slope, single, double)]
        # Terms that nearly cancel are of the size of 1, and their slopes of that of 1 / tau.
        for (own, other, truth), unit in ((losses, 1), (slopes, 1 / tau)):
            allowed = 4 * (other - truth).abs().max() + 4e-7 * (unit + truth.abs().max())
            assert (own - truth).abs().max() <= allowed
    near = KINDS["nearly equal"]
    assert (single[near].double() - double[near]).abs().max() < 1e-6
    if name not in ("binary_ce", "renyi"):
        # To the bit, where torch leaves what is rounded.
        assert not got.loss[KINDS["equal"]].any()
        assert not slope[KINDS["equal"]].any()


@BOTH
@pytest.mark.parametrize("name", ALL)
def test_events_that_are_left_out_are_not_looked_at(implementation, name):
    pytest.importorskip("triton")
    inf, nan = torch.inf, torch.nan
    teacher = torch.tensor([-1.0, -inf, -1.0, nan, -2.0, 1e-6, nan], device=DEVICE)
    student = torch.tensor([-2.0, -1.0, -inf, -inf, nan, 1e-6, -1.0], device=DEVICE)
    compared = torch.tensor([True, True, True, True, False, True, True], device=DEVICE)
    options = BinaryOptions(name)
    events, slope = _compared(teacher, student, compared, options, implementation)
    assert events.kept.tolist() == [True, False, False, False, False, True, True]
    assert slope[[1, 2, 3, 4]].tolist() == [0.0] * 4
    # A certain event that rounding puts above 0 is at 0, where nothing moves it.
    assert events.student_nats[5] == events.teacher_nats[5] == slope[5] == 0.0
    assert events.loss[0].isfinite()
    # NaN shows.
    assert events.loss[6].isnan()


@BOTH
def test_no_event_has_no_loss(implementation):
    pytest.importorskip("triton")
    none = torch.zeros(0, device=DEVICE)
    events, slope = _compared(none, none, none.bool(), BinaryOptions(), implementation)
    assert (len(events.loss), len(slope)) == (0, 0)

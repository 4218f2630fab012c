"""Weights of the terms of a loss, by schedule, by their means or by norms of gradients."""

import math
from typing import Any

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.weighting import (
    FixedWeighting,
    GradientMagnitudeWeighting,
    LayerGradients,
    LossWeighting,
    MatchedWeighting,
    ScheduledWeighting,
)


def test_fixed_weights_are_the_same_at_every_step() -> None:
    weighting = FixedWeighting(kd=2.0, ce=0.0)
    assert weighting.weights(0) == weighting.weights(10**6) == {"kd": 2.0, "ce": 0.0}


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("linear", [0, 0.25, 0.5, 0.75, 1, 1]),
        ("reverse_linear", [1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
        ("reverse_cosine", [0, (1 - math.sqrt(0.5)) / 2, 0.5, (1 + math.sqrt(0.5)) / 2, 1, 1]),
    ],
)
def test_a_schedule_reaches_its_end_at_the_last_step_and_stays(
    schedule: Any, factors: list[float]
) -> None:
    weighting = ScheduledWeighting(steps=5, kd=3.0, ce=0.5, kd_schedule=schedule)
    weights = [weighting.weights(step) for step in (0, 1, 2, 3, 4, 9)]
    assert [w["kd"] for w in weights] == pytest.approx([3 * f for f in factors], abs=1e-12)
    assert [w["ce"] for w in weights] == [0.5] * 6


def test_distillation_is_matched_to_the_mean_of_the_steps_before() -> None:
    weighting = MatchedWeighting(ce=0.5, decay=0.75)
    assert weighting.weights(0) == {"kd": 0.5, "ce": 0.5}
    weighting.observe({"kd": 4.0, "ce": 2.0})
    # One observation: the bias of the averages' beginning cancels.
    assert weighting.weights(1)["kd"] == pytest.approx(0.5 * 2 / 4)
    weighting.observe({"kd": -1.0, "ce": 3.0})
    kd, ce = 0.75 * 4 + 1, 0.75 * 2 + 3
    assert weighting.weights(2)["kd"] == pytest.approx(0.5 * ce / kd)


def test_the_ratio_stays_within_its_bounds() -> None:
    weighting = MatchedWeighting(decay=0.0, lowest=0.1, highest=10.0)
    for kd, ce, ratio in ((1e-9, 1.0, 10.0), (0.0, 1.0, 10.0), (1e9, 1.0, 0.1), (1.0, 0.0, 0.1)):
        weighting.observe({"kd": kd, "ce": ce})
        assert weighting.weights(1)["kd"] == ratio
    weighting.observe({"kd": 0.0, "ce": 0.0})
    assert weighting.weights(1)["kd"] == 1.0


def test_a_step_without_a_chunk_is_not_observed() -> None:
    weighting = MatchedWeighting(decay=0.5)
    weighting.observe({"kd": 4.0, "ce": 2.0})
    before = weighting.weights(1)
    weighting.observe({"ce": 100.0})
    assert weighting.weights(2) == before


def test_terms_are_weighed_by_the_inverse_of_their_gradients() -> None:
    weighting = GradientMagnitudeWeighting(decay=0.5)
    assert weighting.weights(0) == {"kd": 0.5, "ce": 0.5}
    weighting.observe({"kd": 3.0, "ce": 1.0})
    assert weighting.weights(1) == pytest.approx({"kd": 0.25, "ce": 0.75})
    weighting.observe({"kd": 0.0, "ce": 5.0})
    assert weighting.weights(2) == pytest.approx({"kd": 0.25, "ce": 0.75})
    weighting.observe({"kd": 1.0, "ce": 1.0})
    assert weighting.weights(3) == pytest.approx({"kd": 1 / 3, "ce": 2 / 3})
    assert GradientMagnitudeWeighting(terms=("kd",)).weights(0) == {"kd": 1.0}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MatchedWeighting(decay=0.9), MatchedWeighting(decay=0.9)),
        (GradientMagnitudeWeighting(), GradientMagnitudeWeighting()),
        (FixedWeighting(), FixedWeighting()),
        (ScheduledWeighting(steps=9), ScheduledWeighting(steps=9)),
    ],
    ids=lambda weighting: type(weighting).__name__,
)
def test_a_resumed_run_goes_on_with_the_same_weights(
    first: LossWeighting, second: LossWeighting
) -> None:
    values = [{"kd": 1 / (step + 3), "ce": 2.7 - step / 7} for step in range(6)]
    for value in values[:3]:
        first.observe(value)
    second.load_state_dict(first.state_dict())
    for step, value in enumerate(values[3:], start=3):
        assert first.weights(step) == second.weights(step)
        first.observe(value)
        second.observe(value)
    assert first.weights(6) == second.weights(6)
    assert first.state_dict() == second.state_dict()


def test_the_state_is_not_shared_with_who_saved_it() -> None:
    weighting = MatchedWeighting()
    state = weighting.state_dict()
    weighting.observe({"kd": 1.0, "ce": 2.0})
    assert state == {"means": {"kd": 0.0, "ce": 0.0}}


BAD = {
    "a negative weight": lambda: FixedWeighting(kd=-1.0),
    "a weight that is not a number": lambda: FixedWeighting(ce=math.nan),
    "no step": lambda: ScheduledWeighting(steps=0),
    "an unknown schedule": lambda: ScheduledWeighting(steps=1, kd_schedule="up"),
    "a decay of 1": lambda: MatchedWeighting(decay=1.0),
    "bounds in the wrong order": lambda: MatchedWeighting(lowest=2.0, highest=1.0),
    "no term": lambda: GradientMagnitudeWeighting(terms=()),
    "a mean that is not finite": lambda: MatchedWeighting().observe({"kd": math.nan, "ce": 1.0}),
    "a norm that is not finite": lambda: GradientMagnitudeWeighting().observe(
        {"kd": math.inf, "ce": 1.0}
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(LossError):
        BAD[name]()


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
    with pytest.raises(LossError, match=r"kd: no measured parameter gets a gradient"):
        LayerGradients([other], ("kd",)).add({"kd": weight.sum()})
    other.sequence_parallel = True
    with pytest.raises(LossError, match="partial gradient"):
        LayerGradients([other], ("kd",))

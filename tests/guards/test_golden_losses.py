"""Losses and gradients are those that were recorded, by every objective, option and way."""

import pytest

from megatron_ext.losses import LOSS_REGISTRY
from tests.guards.golden_losses import (
    REFUSED,
    golden_paths,
    measure,
    mismatches,
    numbers_of,
    recorded_losses,
)
from tests.guards.loss_cases import loss_cases
from tests.losses.objective_cases import CASES

HOW_TO_RECORD = "if it is meant: python -m tests.guards.record losses"


@pytest.fixture(scope="module")
def recorded():
    return recorded_losses()


@pytest.mark.parametrize("case", loss_cases())
def test_losses_and_gradients_are_those_recorded(case, recorded):
    changes = []
    for name, (make, path) in golden_paths().items():
        if name.rpartition(": ")[0] == case:
            changes += mismatches(
                {name: recorded.get(name)}, {name: numbers_of(measure(make, path))}
            )
    assert not changes, "\n".join([*changes, HOW_TO_RECORD])


def test_every_recorded_loss_is_measured(recorded):
    assert set(recorded) == set(golden_paths())
    assert {case.name for case in CASES.values()} == set(LOSS_REGISTRY)


def test_every_objective_is_recorded_with_a_gradient(recorded):
    for name, case in CASES.items():
        numbers = recorded[f"{name}: alone"]
        trained = "logits" if case.reads_logits else "hidden"
        assert numbers["gradients"][trained]["norm"] > 0
        assert numbers["parts"]["kd"]["count"] > 0
    assert recorded["dskd gated: linear"] == REFUSED


@pytest.mark.parametrize(
    ("measured", "place"),
    [
        ({"sum": 1.00001, "count": 3}, "/sum"),
        ({"sum": 1.0, "count": 4}, "/count"),
        ({"sum": 1.0}, ""),
        (REFUSED, ""),
    ],
)
def test_a_number_that_differs_is_named(measured, place):
    recorded = {"sum": 1.0, "count": 3}
    assert mismatches(recorded, {"sum": 1.0000001, "count": 3}) == []
    [line] = mismatches(recorded, measured)
    assert line.startswith(f"{place}: ")


def test_entries_are_compared_with_the_largest():
    recorded = {"norm": 2.0, "largest": 1.0, "weighted_sum": 0.5, "entries": [1.0, 1e-3]}
    assert mismatches(recorded, recorded | {"entries": [1.0, 1.001e-3]}) == []
    assert len(mismatches(recorded, recorded | {"entries": [1.0, 1.01e-3]})) == 1

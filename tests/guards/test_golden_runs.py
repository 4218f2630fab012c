"""A run that measures something else is noticed, and rounding is not."""

import json

import pytest

from tests.guards.golden_runs import GOLDEN_RUNS, check_golden


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.delenv("MEGATRON_EXT_RECORD_GOLDEN", raising=False)
    recorded = json.loads((GOLDEN_RUNS / "alone.json").read_text())
    return recorded


@pytest.mark.parametrize(
    "change",
    [
        {"loss": lambda value: value * (1 + 1e-6)},
        {"grad_norm": lambda value: value * (1 + 1e-4)},
        {"seconds": lambda value: 3.0},
        {"kd/top1_agreement": lambda value: 0.25},
    ],
    ids=lambda change: next(iter(change)),
)
def test_rounding_and_measurements_of_time_pass(rows, change):
    [(name, of)] = change.items()
    rows[1][name] = of(rows[1].get(name))
    check_golden("alone", rows)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("loss", 1 + 1e-4), ("ce", 1 + 1e-4), ("grad_norm", 1.01), ("tokens", 2), ("chunks", 2)],
)
def test_another_number_is_named(rows, name, factor):
    rows[1][name] *= factor
    with pytest.raises(AssertionError, match=f"row 2: {name} is "):
        check_golden("alone", rows)


def test_a_number_that_is_gone_or_new_is_named(rows):
    rows[-1]["bits"] = rows[-1].pop("student_bits_per_byte")
    with pytest.raises(AssertionError, match=r"bits is new\n.*student_bits_per_byte is gone"):
        check_golden("alone", rows)


def test_another_number_of_iterations_is_noticed(rows):
    with pytest.raises(AssertionError):
        check_golden("alone", rows[:-1])

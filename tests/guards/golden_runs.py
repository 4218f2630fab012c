"""Metrics of tiny runs that tests make anyway, as they were recorded.

A file of ``golden_runs`` is a run, a line of it a row of the run's metrics. To record a change that
is meant, run the tests that call ``check_golden`` with MEGATRON_EXT_RECORD_GOLDEN=1:

    MEGATRON_EXT_RECORD_GOLDEN=1 python -m pytest tests/training -k "measures_what_was_recorded"
"""

import json
import os
from pathlib import Path

import pytest

from megatron_ext.training.metrics import without_measurements

GOLDEN_RUNS = Path(__file__).with_name("golden_runs")

# Sums in another order on another machine, of which each step of the optimizer keeps a share.
_TOLERANCE = 1e-5
_GRADIENT_NORM_TOLERANCE = 1e-3

_CHOICES = ("accuracy", "agreement")
"""Ends of names that are not recorded: models of so few steps choose by the last bit."""


def check_golden(name, rows):
    """Compare a run's metrics with those recorded of it, or record them.

    Counts are the same; other numbers differ by rounding alone.

    Args:
        name: The file's, without a suffix.
        rows: As ``read_metrics`` gives them.
    """
    path = GOLDEN_RUNS / f"{name}.json"
    measured = [_kept(row) for row in rows]
    if os.environ.get("MEGATRON_EXT_RECORD_GOLDEN"):
        lines = ",\n".join(json.dumps(row) for row in measured)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        return
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert len(measured) == len(recorded)
    changes = [
        f"row {number}: {change}"
        for number, pair in enumerate(zip(recorded, measured, strict=True), 1)
        for change in _changes(*pair)
    ]
    assert not changes, "\n".join([*changes, "if it is meant: see tests/guards/golden_runs.py"])


def _kept(row):
    """What is recorded of a row, floats with nine digits."""
    return {
        name: float(f"{value:.9g}") if isinstance(value, float) else value
        for name, value in without_measurements(row).items()
        if not name.endswith(_CHOICES)
    }


def _changes(recorded, measured):
    for key in sorted({*recorded, *measured}):
        if key not in measured or key not in recorded:
            yield f"{key} is {'gone' if key in recorded else 'new'}"
            continue
        was, now = recorded[key], measured[key]
        tolerance = _GRADIENT_NORM_TOLERANCE if "grad_norm" in key else _TOLERANCE
        is_same = now == was
        if isinstance(was, float) and isinstance(now, float):
            is_same = now == pytest.approx(was, rel=tolerance, abs=1e-9, nan_ok=True)
        if not is_same:
            yield f"{key} is {now}, recorded {was}"

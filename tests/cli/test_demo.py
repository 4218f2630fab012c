"""What the demo says of its runs."""

import json

import pytest

from megatron_ext.cli.demo.outcome import DemoError, check_outcome

BETTER = {"student_bits_per_byte": 2.4, "student_accuracy": 0.2, "agreement": 0.4}
WORSE = {"student_bits_per_byte": 2.6, "student_accuracy": 0.1, "agreement": 0.2}


def write_runs(root, distilled, undistilled):
    for name, row in (("distilled", distilled), ("undistilled", undistilled)):
        folder = root / name
        folder.mkdir(exist_ok=True)
        # A row of a step without a measurement stands behind that of the last one.
        rows = [{"iteration": 1} | row, {"iteration": 2, "loss": 1.0}]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines)


def test_a_student_that_is_better_by_every_measure_passes(tmp_path):
    write_runs(tmp_path, BETTER, WORSE)
    check_outcome(tmp_path)


@pytest.mark.parametrize("measure", BETTER)
def test_a_student_that_has_learnt_no_more_by_one_measure_fails(tmp_path, measure):
    write_runs(tmp_path, BETTER | {measure: WORSE[measure]}, WORSE)
    expected = f"{measure}: the distilled student is not better .* got {WORSE[measure]:.3f}"
    with pytest.raises(DemoError, match=expected):
        check_outcome(tmp_path)

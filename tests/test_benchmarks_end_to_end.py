"""The benchmark of whole steps measures what it says, in small."""

import os

import pytest

from benchmarks.end_to_end import measure, parse
from tests.process_group import run_ranks

TINY = (
    *("--layers=1", "--hidden=64", "--teacher-layers=1", "--teacher-hidden=64"),
    *("--seq-length=32", "--micro-batch-size=1", "--global-batch-size=2"),
    *("--rounds=2", "--steps=1", "--num-workers=0"),
)


def measure_tiny(rank):
    return measure(parse(TINY))


@pytest.mark.skipif(
    not os.environ.get("MEGATRON_EXT_ALL_TEXT"), reason="two published vocabularies in whole steps"
)
def test_a_result_has_three_times_and_shares_of_a_whole_step():
    (found,) = run_ranks(1, measure_tiny)
    samples = {row["kind"]: row["seconds"] for row in found["samples"]}
    assert {kind: len(seconds) for kind, seconds in samples.items()} == {
        "plain": 2,
        "teacher": 2,
        "distil": 2,
    }
    sum_of_parts = found["plain_seconds"] + found["teacher_seconds"]
    assert found["ratio"] == pytest.approx(found["distil_seconds"] / sum_of_parts)
    assert found["student_parameters"] > 131_072 * 64
    assert 0.9 < found["head_share"] < 1
    assert {"data", "teacher", "student", "loss", "optimizer"} <= set(found["shares"])
    assert sum(found["shares"].values()) == pytest.approx(1, abs=0.2)
    assert 0 <= found["waiting_share"] < 1

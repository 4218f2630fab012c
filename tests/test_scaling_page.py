"""The page on scaling has the numbers of its formulas, and measured ones where there are some."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "generate_scaling.py"))


def test_the_page_is_current(script):
    assert script["PAGE"].read_text(encoding="utf-8") == script["scaling_page"](), (
        "run: python docs/generate_scaling.py"
    )


def test_the_layouts_of_the_page_are_of_whole_replicas_up_to_1024(script):
    gpus = {layout.gpus for layout in script["LAYOUTS"]}
    assert {1, 1024} <= gpus
    for layout in script["LAYOUTS"]:
        plan = script["plan_of"](layout, script["ROWS"])
        assert plan.dp * layout.tp * layout.pp == layout.gpus


def test_a_result_of_the_benchmark_is_shown_with_its_machine(script, tmp_path, monkeypatch):
    names = script["scaling_page"].__globals__
    monkeypatch.setitem(names, "RESULTS", tmp_path)
    assert script["_measured"]() == [script["NOT_MEASURED"]]
    result = {
        "machine": {"cpu": "Example CPU", "torch": "2.13"},
        "threads": 2,
        "precision": "fp32",
        "plain_seconds": 10.0,
        "teacher_seconds": 5.0,
        "distil_seconds": 16.5,
        "ratio": 1.1,
        "waiting_share": 0.0123,
        "tokens_per_second": 62.06,
    }
    (tmp_path / "end_to_end.json").write_text(json.dumps(result))
    lines = script["_measured"]()
    assert lines[0] == "On Example CPU, 2 threads, torch 2.13, fp32:"
    assert "| distillation over the other two | 1.100 |" in lines
    assert "| share of the run in which no sample was at hand | 1.23% |" in lines

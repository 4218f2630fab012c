"""Tasks between steps have the numbers of ``evaluate`` and change nothing of the run."""

import json
import os
from dataclasses import replace

import pytest
import torch

from megatron_ext.errors import ConfigError, MegatronExtError, UnknownNameError
from megatron_ext.evaluation.run_tasks import RunTasks, cut_warning, main_metrics
from megatron_ext.evaluation.tasks import gsm8k
from megatron_ext.training.configuration.teachers import (
    NEW_TOKENS,
    EvaluationConfig,
    EvaluationTaskConfig,
)
from tests.evaluation.evaluation_ranks import evaluate
from tests.evaluation.run_task_ranks import run_config, train, write_tasks
from tests.process_group import run_ranks
from tests.training.tiny_run import write_corpus, write_rank_list

LAYOUTS = {"tp2": {"tensor_model_parallel_size": 2}}
"""Stages and replicas too with MEGATRON_EXT_ALL_TEXT."""
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    LAYOUTS["pp2"] = {"pipeline_model_parallel_size": 2}
    LAYOUTS["dp2"] = {"use_distributed_optimizer": True}

NAMES = {
    "eval/bits_per_byte/bits_per_byte",
    "eval/bits_per_byte/nats_per_token",
    "eval/bits_per_byte/bytes_per_token",
    "eval/mmlu/accuracy",
    "eval/mmlu/accuracy_over_subjects",
    "eval/sums/exact_match/strict",
    "eval/sums/exact_match/flexible",
}
TIMES = ("seconds", "tokens_per_second", "memory_bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_corpus(folder)
    write_rank_list(folder)
    write_tasks(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(2, train, folder, LAYOUTS, timeout_s=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_with_tasks_without_them_and_resumed(ranks, layout):
    for rank in ranks:
        plain, measured, resumed = rank[layout]["weights"]
        for name, value in plain.items():
            assert torch.equal(measured[name], value), name
            assert torch.equal(resumed[name], value), name
    plain_log, log, resumed_log = ranks[-1][layout]["logs"]
    for before, after, again in zip(plain_log, log, resumed_log, strict=True):
        assert {name for name in after if name.startswith("eval/")} == NAMES
        assert _without_times(after) == _without_times(again)
        assert _without_times(before) == {
            name: value for name, value in _without_times(after).items() if name not in NAMES
        }


def test_the_numbers_are_those_of_evaluate_on_the_checkpoint(folder, ranks, tmp_path):
    options = {"checkpoint": folder / "tp2", "task": "bits_per_byte"}
    options |= {"data": folder / "held-out.jsonl", "output": tmp_path / "results.json"}
    run_ranks(1, evaluate, [f"--{name}={value}" for name, value in options.items()])
    results = json.loads((tmp_path / "results.json").read_text())["metrics"]
    last = ranks[-1]["tp2"]["logs"][1][-1]
    for name, value in results.items():
        assert last[f"eval/bits_per_byte/{name}"] == pytest.approx(value, rel=1e-5)


def test_prompts_that_lost_their_beginnings_are_counted(folder, tmp_path):
    options = {"checkpoint": folder / "tp2", "task": "gsm8k", "data": folder / "gsm8k.jsonl"}
    options |= {"few-shot-data": folder / "gsm8k.jsonl", "output": tmp_path / "results.json"}
    counts = {"num-fewshot": 2, "max-new-tokens": 4, "seq-length": 24}
    run_ranks(1, evaluate, [f"--{name}={value}" for name, value in {**options, **counts}.items()])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["cut_prompts"] == results["count"] > 0
    assert cut_warning(2, 3).startswith("2 of 3 prompts are longer than the model reads")


def test_completions_that_leave_no_room_are_refused_before_anything_runs(folder):
    config = run_config(folder, "no-room")
    for task, tokens in (("gsm8k", None), ("sums", 999)):
        section = EvaluationTaskConfig(data="x", task="gsm8k", max_new_tokens=tokens)
        with pytest.raises(ConfigError, match=rf"evaluation.tasks.{task}.max_new_tokens.* below"):
            replace(config, evaluation=EvaluationConfig(tasks={task: section}))


def test_the_configuration_knows_how_many_tokens_a_task_takes_by_itself():
    assert {"gsm8k": gsm8k._NEW_TOKENS} == NEW_TOKENS


def test_parts_of_a_metric_are_left_out():
    metrics = {"accuracy": 0.5, "accuracy/law": 1.0, "exact_match/strict": 0.25}
    assert main_metrics("x", metrics) == {"eval/x/accuracy": 0.5, "eval/x/exact_match/strict": 0.25}


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("humaneval_plus", {}, ConfigError),
        ("no_such_task", {}, UnknownNameError),
        ("gsm8k", {"data": "missing.jsonl"}, MegatronExtError),
    ],
)
def test_what_a_run_cannot_ask_is_refused_before_a_model_is_built(folder, name, options, error):
    task = EvaluationTaskConfig(**{"data": str(folder / "gsm8k.jsonl"), **options})
    with pytest.raises(error, match=r"humaneval_plus|no_such_task|missing\.jsonl"):
        RunTasks(EvaluationConfig(tasks={name: task}))


def _without_times(row):
    return {
        name: value
        for name, value in row.items()
        if name not in TIMES and not name.startswith("seconds/")
    }

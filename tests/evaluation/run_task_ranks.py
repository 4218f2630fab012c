"""What spawned ranks run: a run with tasks between its steps, without them, and resumed."""

import json
from pathlib import Path

import torch.distributed as dist

from megatron_ext.evaluation.run_tasks import RunTasks
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.configuration.teachers import EvaluationTaskConfig
from megatron_ext.training.distill import measurement
from megatron_ext.training.metrics import read_metrics
from tests.training.rank_functions import _trainer
from tests.training.tiny_run import changed, objective_run

PROBLEMS = [("2 + 3?", "5\n#### 5"), ("4?", "#### 4"), ("1?", "#### 1")]


def write_tasks(folder):
    """Files of three tasks."""
    problems = [json.dumps({"question": q, "answer": a}) for q, a in PROBLEMS]
    (folder / "gsm8k.jsonl").write_text("\n".join(problems))
    questions = [
        {"question": f"{n}?", "subject": s, "choices": ["a", "b", "c", "d"], "answer": n % 4}
        for n, s in enumerate(("law", "law", "logic"))
    ]
    (folder / "mmlu.jsonl").write_text("\n".join(map(json.dumps, questions)))


def run_config(folder, name, **parallel):
    """Two steps of next-token training, saved at each."""
    config = objective_run(folder, name, LossConfig(objective="next_token"), **parallel)
    return changed(config, teacher=None, initial_checkpoint=None, training={"save_interval": 1})


def with_tasks(config, folder):
    """The run, measured after every step."""
    tasks = {
        "bits_per_byte": EvaluationTaskConfig(data=str(folder / "held-out.jsonl")),
        "mmlu": EvaluationTaskConfig(data=str(folder / "mmlu.jsonl"), num_fewshot=0),
        "sums": EvaluationTaskConfig(
            data=str(folder / "gsm8k.jsonl"), task="gsm8k", num_fewshot=0, max_new_tokens=4, limit=2
        ),
    }
    return changed(config, evaluation={"tasks": tasks, "interval": 1})


def train(rank, folder, layouts):
    """The logs of each layout's runs, and the weights they end with."""
    found = {}
    for name, parallel in layouts.items():
        plain = run_config(folder, f"{name}-plain", **parallel)
        measured = with_tasks(run_config(folder, name, **parallel), folder)
        weights = [_train(plain), _train(measured)]
        logs = [read_metrics(Path(config.run_dir)) for config in (plain, measured)]
        dist.barrier()
        if not rank:
            (Path(measured.run_dir) / "checkpoints" / "latest").write_text("iter_0000001\n")
        dist.barrier()
        weights.append(_train(measured))
        logs.append(read_metrics(Path(measured.run_dir)))
        found[name] = {"weights": weights, "logs": logs}
    return found


def _train(config):
    tasks = RunTasks(config.evaluation) if config.evaluation.tasks else None
    trainer = _trainer(config)
    trainer.train(measurement(trainer, tasks, build_tokenizer(config.tokenizer)))
    chunk = trainer.student.chunks[-1]
    assert chunk.training
    return {name: value.detach().clone() for name, value in chunk.named_parameters()}

"""What spawned ranks run: one step of a run whose student and teacher are HuggingFace folders."""

import argparse
from contextlib import nullcontext
from unittest.mock import patch

import yaml

from megatron_ext.training.checkpoints.saved_run import SavedRun
from megatron_ext.training.configuration.arguments import config_from_arguments
from tests.training.rank_functions import _trainer


def train_one_step(rank, root, name):
    """By ``root/NAME.yaml``."""
    _trainer(config_from_arguments(argparse.Namespace(config=str(root / f"{name}.yaml")))).train()


def train_runs(rank, root, names, unsaved=()):
    """``train_one_step`` of one run after the other; those of ``unsaved`` leave no checkpoint."""
    for name in names:
        with patch.object(SavedRun, "save") if name in unsaved else nullcontext():
            train_one_step(rank, root, name)


def write_adapter_run(root, name, *, start, lora=None, training=None, **parallel):
    """A run from the folder or run ``start``, with adapters if any, or of a step of nearly 0."""
    for file in ("text.jsonl", "held-out.jsonl"):
        (root / file).write_text('{"text": "the theory of the other thing"}\n' * 8)
    run = {
        "run_dir": str(root / name),
        "initial_checkpoint": str(root / start),
        "student": {"seq_length": 32, "make_vocab_size_divisible_by": 8},
        "data": {
            "train": [str(root / "text.jsonl")],
            "validation": [str(root / "held-out.jsonl")],
        },
        "loss": {"objective": "next_token"},
        "lora": lora,
        "optimizer": {"lr": 1e-2 if lora else 1e-30, "lr_decay_style": "constant"},
        "training": {"train_iters": 3 if lora else 1, "global_batch_size": 2, **(training or {})},
        "parallel": parallel,
    }
    (root / f"{name}.yaml").write_text(yaml.safe_dump(run))


def write_run(
    root, name, *, student, teacher, library="megatron", objective="vocab_kl", **parallel
):
    """A run at a learning rate that is too small to change a weight."""
    (root / "text.jsonl").write_text('{"text": "the theory of the other thing"}\n' * 8)
    sizes = {"seq_length": 32, "make_vocab_size_divisible_by": 8}
    run = {
        "run_dir": str(root / name),
        "initial_checkpoint": str(root / student),
        "student": dict(sizes),
        "teacher": {
            "checkpoint": str(root / teacher),
            "model": dict(sizes),
            "library": library,
        },
        "data": {"train": [str(root / "text.jsonl")]},
        "loss": {"objective": objective},
        "optimizer": {"lr": 1e-30},
        "training": {"train_iters": 1, "global_batch_size": 2},
        "parallel": parallel,
    }
    (root / f"{name}.yaml").write_text(yaml.safe_dump(run))

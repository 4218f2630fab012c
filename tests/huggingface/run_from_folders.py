"""What spawned ranks run: one step of a run whose student and teacher are HuggingFace folders."""

import argparse

import yaml

from megatron_ext.training.arguments import config_from_arguments
from tests.training.rank_functions import _trainer


def train_one_step(rank, root, name):
    """By ``root/NAME.yaml``."""
    _trainer(config_from_arguments(argparse.Namespace(config=str(root / f"{name}.yaml")))).train()


def write_run(root, name, *, student, teacher, **parallel):
    """A run at a learning rate that is too small to change a weight."""
    (root / "text.jsonl").write_text('{"text": "the theory of the other thing"}\n' * 8)
    sizes = {"seq_length": 32, "make_vocab_size_divisible_by": 8}
    run = {
        "run_dir": str(root / name),
        "initial_checkpoint": str(root / student),
        "student": dict(sizes),
        "teacher": {"checkpoint": str(root / teacher), "model": dict(sizes)},
        "data": {"train": [str(root / "text.jsonl")]},
        "loss": {"objective": "vocab_kl"},
        "optimizer": {"lr": 1e-30},
        "training": {"train_iters": 1, "global_batch_size": 2},
        "parallel": parallel,
    }
    (root / f"{name}.yaml").write_text(yaml.safe_dump(run))

"""Train a model on conversations, without a teacher, on megatron-core.

    torchrun --nproc-per-node 4 -m megatron_ext sft --config run.yaml --tokenizer-prompt-format auto

The configuration is that of megatron-ext distill without teachers, with records of
conversations in data.train. The loss is the cross-entropy of the tokens that the prompt format and
--tokenizer-train-on name.
"""

from __future__ import annotations

import argparse

from megatron_ext.cli import train
from megatron_ext.cli.train import add_arguments as add_arguments


def run(arguments: argparse.Namespace) -> None:
    """Train on conversations."""
    train.run_alone(
        arguments,
        {("data", "conversations"): True},
        fix="train on texts with megatron-ext train",
    )

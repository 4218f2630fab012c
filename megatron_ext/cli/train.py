"""Train a model on texts, without a teacher, on megatron-core.

    torchrun --nproc-per-node 4 -m megatron_ext train --config run.yaml --lr 3e-4

The configuration is that of megatron-ext distill without teachers, the loss the cross-entropy
of the next token. Everything else is the same: layouts, resuming, checkpoints, --dry-run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.cli import distill
from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.arguments import given_value, set_value

_OF_TEACHERS: Final = ("teacher", "teachers", "projection")
"""Keys of a configuration that mean nothing without a teacher."""

_NOT_SHOWN: Final = (
    *_OF_TEACHERS,
    *("data.rollouts", "data.conversations", "loss.objective", "loss.options", "loss.temperature"),
    *("loss.kd_weight", "loss.teacher", "loss.vocab_normalisation", "loss.learned_projection"),
)
"""Beginnings of the keys that the verb sets itself, or that mean nothing without a teacher."""

_WITH_TEACHER: Final = "train with megatron-ext distill, or leave it out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``megatron-ext distill``; those of no use here are not in the help."""
    distill.add_arguments(parser)
    for action in parser._actions:
        if action.dest.startswith(_NOT_SHOWN):
            # Still parsed, so that their error says which verb has teachers.
            action.help = argparse.SUPPRESS


def run(arguments: argparse.Namespace) -> None:
    """Train on texts."""
    run_alone(
        arguments,
        {("data", "conversations"): False},
        fix="train on conversations with megatron-ext sft",
    )


def run_alone(
    arguments: argparse.Namespace, values: Mapping[tuple[str, ...], Any], *, fix: str
) -> None:
    """``megatron-ext distill`` without a teacher.

    Args:
        arguments: Parsed flags.
        values: Values of the configuration that the verb stands for.
        fix: Remedy where the configuration has other values than these.

    Raises:
        ConfigError: There is a teacher, or the configuration contradicts ``values``.
    """
    for key in _OF_TEACHERS:
        if given_value(arguments, key):
            raise ConfigError(
                "this verb trains without a teacher",
                where=key,
                got=f"a value for {key}",
                fix=_WITH_TEACHER,
            )
    objective = ("loss", "objective")
    for keys, value in {objective: "next_token", **values}.items():
        given = given_value(arguments, *keys)
        if given is not None and given != value:
            raise ConfigError(
                "this verb has another value",
                where=".".join(keys),
                got=given,
                expected=value,
                fix=_WITH_TEACHER if keys == objective else fix,
            )
        set_value(arguments, value, *keys)
    distill.run(arguments)

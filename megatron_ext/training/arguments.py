"""Command-line flags, generated from the configuration dataclasses.

A field's flag is its name in kebab case behind the prefixes of the sections around it:
``teacher.model.num_layers`` is ``--teacher-num-layers``, ``tokenizer.library`` is
``--tokenizer-library``.
"""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any

from megatron_ext.training.config import DistillConfig
from megatron_ext.training.config_file import build_config, read_config_file
from megatron_ext.training.flag import Flag, argparse_type, flags_of
from megatron_ext.training.model_section import with_huggingface_models

_SEPARATOR = "."


@cache
def config_flags(config_type: type = DistillConfig) -> tuple[Flag, ...]:
    """Every flag of ``config_type``, in the order of its fields."""
    return tuple(flags_of(config_type))


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and a flag for every configuration key; a flag overrides the file."""
    parser.add_argument("--config", metavar="FILE", help="YAML configuration file")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in config_flags():
        group = groups.get(flag.section)
        if group is None:
            group = groups[flag.section] = parser.add_argument_group(flag.section)
        group.add_argument(
            flag.name,
            dest=_SEPARATOR.join(flag.keys),
            default=argparse.SUPPRESS,
            help=flag.help.replace("%", "%%"),
            **argparse_type(flag.hint),
        )


def config_from_arguments(namespace: argparse.Namespace) -> DistillConfig:
    """The configuration that the file and the flags describe together.

    Raises:
        ConfigError: As ``build_config``, naming the file and line, or the flag.
        CheckpointError: A model is to be taken from a folder that is not there, or cannot be read.
    """
    file_values, file_where = (
        read_config_file(namespace.config) if namespace.config else ({}, lambda keys: "flags")
    )
    flag_of = {flag.keys: flag.name for flag in config_flags()}
    given = {tuple(name.split(_SEPARATOR)): value for name, value in vars(namespace).items()}
    overrides = {keys: value for keys, value in given.items() if keys in flag_of}
    values = file_values
    for keys, value in overrides.items():
        values = _with(values, keys, value)

    def where(keys: tuple[str, ...]) -> str:
        return flag_of[keys] if keys in overrides else file_where(keys)

    return build_config(DistillConfig, with_huggingface_models(values, where), where)


def _with(values: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of ``values`` with the leaf at ``keys`` set."""
    if len(keys) == 1:
        return {**values, keys[0]: value}
    inner = {} if values.get(keys[0]) is None else values[keys[0]]
    if not isinstance(inner, dict):
        # Left as it is, for the complaint that this section is no mapping.
        return values
    return {**values, keys[0]: _with(inner, keys[1:], value)}

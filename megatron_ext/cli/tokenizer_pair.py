"""Flags that name a student's and a teacher's tokenizer, spelled as ``megatron-ext distill`` does.

``--student`` is short for ``--tokenizer-model``, ``--teacher`` for ``--teacher-tokenizer-model``.
"""

from __future__ import annotations

import argparse
from typing import Final

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.training.config_file import build_config
from megatron_ext.training.flag import argparse_type, flags_of

_PREFIXES: Final = {"student": "tokenizer-", "teacher": "teacher-tokenizer-"}
_MODEL: Final = "model"


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both tokenizers."""
    for side, prefix in _PREFIXES.items():
        group = parser.add_argument_group(f"{side}'s tokenizer")
        for flag in flags_of(TokenizerConfig, prefix=prefix):
            names = [f"--{side}"] if flag.keys[-1] == _MODEL else []
            group.add_argument(
                *names,
                flag.name,
                dest=f"{side}.{flag.keys[-1]}",
                default=argparse.SUPPRESS,
                help=flag.help.replace("%", "%%"),
                **argparse_type(flag.hint),
            )


def pair_from_arguments(
    arguments: argparse.Namespace,
) -> tuple[MegatronTokenizerText, MegatronTokenizerText]:
    """The student's tokenizer and the teacher's.

    Raises:
        ConfigError: One is not named, or a flag is unusable.
        TokenizerError: A file is missing or broken.
        MissingDependencyError: A library is not installed.
    """
    student, teacher = (_tokenizer(arguments, side) for side in _PREFIXES)
    return student, teacher


def _tokenizer(arguments: argparse.Namespace, side: str) -> MegatronTokenizerText:
    values = {
        name.removeprefix(f"{side}."): value
        for name, value in vars(arguments).items()
        if name.startswith(f"{side}.")
    }
    if not values.keys() & {_MODEL, "library"}:
        raise ConfigError(
            "no tokenizer is named",
            where=f"--{side}",
            expected="a tokenizer file, its directory, or its name on the HuggingFace hub",
        )
    spelled = {flag.keys: flag.name for flag in flags_of(TokenizerConfig, prefix=_PREFIXES[side])}
    config = build_config(TokenizerConfig, values, lambda keys: spelled.get(keys, f"--{side}"))
    return build_tokenizer(config)

"""The tokenizer's command-line flags: ours, and those of every Megatron release.

A flag that is not given leaves no attribute, so what a namespace holds was said by the user or is a
default of a parser that had the flag before, which ``tokenizer_unspoken`` then names.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES
from megatron_ext.tokenizers.namespace import config_from_namespace
from megatron_ext.training.flag import Flag, argparse_type, flags_of
from megatron_ext.training.spoken_flags import check_spoken, note_spoken

_SECTION: Final = "tokenizer"


@dataclass(frozen=True, slots=True)
class OldFlag:
    """A flag of some Megatron release that is not the flag of a field."""

    names: tuple[str, ...]
    help: str
    options: Mapping[str, Any]


def _old(*names: str, help: str, **options: Any) -> OldFlag:
    return OldFlag(names, help, options)


OLD_FLAGS: Final = (
    _old(
        "--tokenizer-type",
        choices=tuple(LEGACY_TYPES),
        help="Old name of a library and a mode; use --tokenizer-library and --tokenizer-mode.",
    ),
    _old(
        "--sft-tokenizer-prompt-format",
        metavar="STR",
        help="Old name of --tokenizer-prompt-format.",
    ),
    _old(
        "--special-tokens",
        nargs="*",
        metavar="VALUE",
        help="Old name of --tokenizer-special-tokens, in mode multimodal.",
    ),
    _old(
        "--tiktoken-special-tokens",
        nargs="+",
        metavar="VALUE",
        help="Old name of --tokenizer-special-tokens, for the tiktoken library.",
    ),
    _old(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="Opposite of --tokenizer-hf-include-special-tokens.",
    ),
    _old(
        "--tokenizer-hf-no-use-fast",
        action="store_true",
        help="Opposite of --tokenizer-hf-use-fast.",
    ),
    _old(
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        dest="tokenizer_sentencepiece_ignore_extra_whitespaces",
        action="store_false",
        help="Opposite of --tokenizer-sentencepiece-ignore-extra-whitespaces.",
    ),
    _old("--use-gigatoken", action="store_true", help="Old name of --tokenizer-engine gigatoken."),
    _old(
        "--legacy-tokenizer",
        action="store_true",
        help="Tokenize as Megatron 0.15 did; only a checkout of Megatron-LM that can do so does.",
    ),
    _old(
        "--padded-vocab-size",
        type=int,
        metavar="INT",
        help="Rows of the embedding; vocab_size padded to what the model asks for when unset.",
    ),
    _old(
        "--no-pad-vocab-size",
        "--disable-pad-vocab-size",
        dest="pad_vocab_size",
        action="store_false",
        help="Leave the number of rows of the embedding to --padded-vocab-size.",
    ),
)
"""Flags of Megatron 0.16 and of its successors, for command lines that hold them."""


def tokenizer_flags() -> list[Flag]:
    """The flag of every field of ``TokenizerConfig``, in Megatron's spelling where it has one."""
    spellings = {option.name: option.metadata.get("flag") for option in fields(TokenizerConfig)}
    return [
        Flag(spellings[flag.keys[-1]] or flag.name, flag.keys, flag.hint, flag.help, _SECTION)
        for flag in flags_of(TokenizerConfig, prefix="tokenizer-")
    ]


def add_tokenizer_arguments(
    parser: argparse.ArgumentParser, *, existing: Literal["skip", "error"] = "skip"
) -> None:
    """Add every tokenizer flag to ``parser``, and let it note what its user said in those it had.

    Args:
        parser: A parser, or one of Megatron's with flags of its own, which is changed.
        existing: What to do where ``parser`` has a flag of that name: keep it and let it take any
            value that ours takes, or raise argparse's error.
    """
    add_missing_flags(parser, existing=existing)
    note_spoken(parser)


def add_missing_flags(
    parser: argparse.ArgumentParser, *, existing: Literal["skip", "error"] = "skip"
) -> None:
    """``add_tokenizer_arguments`` without the note."""
    group = parser.add_argument_group(_SECTION)
    known = parser._option_string_actions if existing == "skip" else {}
    for flag in tokenizer_flags():
        forms = _forms(flag)
        either = len(forms) > 1 and any(name not in known for name, _, _ in forms)
        container = group.add_mutually_exclusive_group() if either else group
        for name, help, options in forms:
            _add(container, known, (name,), help, options)
    for old in OLD_FLAGS:
        _add(group, known, old.names, old.help, old.options)


def tokenizer_config_from_arguments(namespace: argparse.Namespace) -> TokenizerConfig:
    """The tokenizer that parsed flags describe.

    Args:
        namespace: What a parser with no tokenizer flags but ``add_tokenizer_arguments``' parsed.

    Raises:
        ConfigError: Flags contradict each other, one is for another library, or a value is
            unusable.
    """
    check_spoken(namespace)
    config = config_from_namespace(namespace)
    for flag, option in zip(tokenizer_flags(), fields(TokenizerConfig), strict=True):
        only = option.metadata.get("only")
        if config.library is None or only is None or config.library in only:
            continue
        if hasattr(namespace, _destination(flag.name)):
            raise ConfigError(
                f"the flag is for the {' or '.join(only)} library",
                got=f"library {config.library}",
                fix="leave it out",
                where=flag.name,
            )
    return config


def _forms(flag: Flag) -> list[tuple[str, str, dict[str, Any]]]:
    """Option string, help and argparse's options of a flag; a switch has one for each way."""
    destination = _destination(flag.name)
    if flag.hint is not bool:
        return [(flag.name, flag.help, {"dest": destination, **argparse_type(flag.hint)})]
    on = {"dest": destination, "action": "store_true"}
    off = {"dest": destination, "action": "store_false"}
    return [
        (flag.name, flag.help, on),
        (f"--no-{flag.name[2:]}", f"Opposite of {flag.name}.", off),
    ]


def _add(
    container: argparse._ArgumentGroup | argparse._MutuallyExclusiveGroup,
    known: Mapping[str, argparse.Action],
    names: tuple[str, ...],
    help: str,
    options: Mapping[str, Any],
) -> None:
    for name in names:
        if name in known and "choices" not in options:
            known[name].choices = None
    new = [name for name in names if name not in known]
    if new:
        container.add_argument(
            *new, default=argparse.SUPPRESS, help=help.replace("%", "%%"), **options
        )


def _destination(name: str) -> str:
    return name[2:].replace("-", "_")

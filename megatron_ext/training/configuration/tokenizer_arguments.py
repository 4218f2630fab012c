"""The tokenizer's command-line flags: ours, and those of every Megatron release.

A flag that is not given leaves no attribute, so every attribute of a namespace was given explicitly
or is a default of a parser that had the flag before, which ``tokenizer_unspoken`` then names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.tokenizers.legacy_types import LEGACY_TYPES, OLD_FORMAT, UNSPOKEN
from megatron_ext.tokenizers.namespace import config_from_namespace
from megatron_ext.training.configuration.arguments import (
    Flag,
    argparse_type,
    flags_of,
    mark_advanced,
    terminal_help,
)

_OPPOSITES: Final = {
    "tokenizer_hf_include_special_tokens": "tokenizer_hf_no_include_special_tokens",
    "tokenizer_hf_use_fast": "tokenizer_hf_no_use_fast",
}
BASIC_FIELDS: Final = frozenset(
    {"library", "model", "mode", "prompt_format", "chat_template", "metadata"}
)
"""Fields of ``TokenizerConfig`` whose flags are in the short help."""

NOTED_DESTINATIONS: Final[frozenset[str]] = frozenset(
    {*_OPPOSITES, *_OPPOSITES.values(), OLD_FORMAT}
)
"""Attributes for which explicit flags are noted, since releases differ in their defaults."""

Parse = Callable[[Sequence[str] | None, Any], tuple[Any, list[str]]]
"""A parser's ``parse_known_args``."""


def note_explicit_flags(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` note which of ``NOTED_DESTINATIONS`` were given, if it has defaults."""
    parse = parser.parse_known_args
    if not _with_defaults(parser):
        return

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        return parse_noting_explicit_flags(parser, parse, args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def parse_noting_explicit_flags(
    parser: argparse.ArgumentParser, parse: Parse, args: Sequence[str] | None, namespace: Any
) -> tuple[Any, list[str]]:
    """The result of ``parse``, a ``parse_known_args`` of ``parser``, with explicit flags noted.

    The namespace's ``tokenizer_unspoken`` names those of ``NOTED_DESTINATIONS`` that hold a default
    of the parser, where it has any such default.
    """
    with _without_defaults(parser) as defaults:
        namespace, rest = parse(args, namespace)
    implicit = [name for name in defaults if not hasattr(namespace, name)]
    for name in implicit:
        setattr(namespace, name, defaults[name])
    if defaults:
        setattr(namespace, UNSPOKEN, implicit)
    return namespace, rest


def explicit_flags(namespace: Any) -> set[str]:
    """The ones of ``NOTED_DESTINATIONS`` that were given explicitly."""
    present = {name for name in NOTED_DESTINATIONS if hasattr(namespace, name)}
    return present - set(getattr(namespace, UNSPOKEN, ()))


def check_explicit_flags(namespace: Any, *, has_legacy_tokenizers: bool = False) -> None:
    """Check that explicit flags of several releases do not contradict each other.

    Args:
        namespace: Parsed flags.
        has_legacy_tokenizers: Whether something honours ``--legacy-tokenizer``.

    Raises:
        ConfigError: Flags contradict each other.
    """
    explicit = explicit_flags(namespace)
    for name, opposite in _OPPOSITES.items():
        if {name, opposite} <= explicit and getattr(namespace, name):
            raise ConfigError(
                "two flags contradict each other",
                got=f"{_flag(name)} and {_flag(opposite)}",
                fix="leave one out",
            )
    if getattr(namespace, "legacy_tokenizer", False):
        _check_legacy_tokenizer(namespace, has_legacy_tokenizers)


def _check_legacy_tokenizer(namespace: Any, available: bool) -> None:
    if not available:
        raise ConfigError(
            "nothing here tokenizes as Megatron-LM did before 0.16",
            fix="leave the flag out; the ids of Llama2Tokenizer lose their BOS",
            where="--legacy-tokenizer",
        )
    for name in ("tokenizer_library", "tokenizer_mode", "tokenizer_engine"):
        if getattr(namespace, name, None) is not None:
            raise ConfigError(
                "two flags contradict each other",
                got=f"--legacy-tokenizer and {_flag(name)}",
                fix="leave --legacy-tokenizer out",
            )


def _with_defaults(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Actions of ``NOTED_DESTINATIONS`` that set a default where the flag is not given."""
    return [
        action
        for action in parser._actions
        if action.dest in NOTED_DESTINATIONS and action.default is not argparse.SUPPRESS
    ]


@contextmanager
def _without_defaults(parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    """Remove these defaults while entered, so that only given flags leave attributes."""
    actions = _with_defaults(parser)
    defaults = {action.dest: action.default for action in actions}
    # Values of ``set_defaults`` are stored here as well.
    set_before = {name: parser._defaults.pop(name) for name in defaults if name in parser._defaults}
    try:
        for action in actions:
            action.default = argparse.SUPPRESS
        yield defaults
    finally:
        parser._defaults.update(set_before)
        for action in actions:
            action.default = defaults[action.dest]


def _flag(destination: str) -> str:
    return f"--{destination.replace('_', '-')}"


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
    """Add every tokenizer flag to ``parser``, and let it note explicit flags.

    Args:
        parser: A parser, or one of Megatron's with flags of its own, which is changed.
        existing: What to do where ``parser`` has a flag of that name: keep it and let it take any
            value that ours takes, or raise argparse's error.
    """
    add_missing_flags(parser, existing=existing)
    note_explicit_flags(parser)


def add_short_tokenizer_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--tokenizer`` for ``--tokenizer-model``, its name in the verbs that take a model."""
    parser.add_argument(
        f"--{_SECTION}",
        dest=f"{_SECTION}_model",
        default=argparse.SUPPRESS,
        metavar="STR",
        help=f"Short for --{_SECTION}-model.",
    )


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
            is_advanced = flag.keys[-1] not in BASIC_FIELDS
            _add(container, known, (name,), help, options, is_advanced=is_advanced)
    for old in OLD_FLAGS:
        _add(group, known, old.names, old.help, old.options, is_advanced=True)


def tokenizer_config_from_arguments(namespace: argparse.Namespace) -> TokenizerConfig:
    """The tokenizer that parsed flags describe.

    Args:
        namespace: Result of a parser with the flags of ``add_tokenizer_arguments``.

    Raises:
        ConfigError: Flags contradict each other, one is for another library, or a value is
            unusable.
    """
    check_explicit_flags(namespace)
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
    *,
    is_advanced: bool,
) -> None:
    for name in names:
        if name in known and "choices" not in options:
            known[name].choices = None
    new = [name for name in names if name not in known]
    if new:
        action = container.add_argument(
            *new, default=argparse.SUPPRESS, help=terminal_help(help), **options
        )
        if is_advanced:
            mark_advanced(action)


def _destination(name: str) -> str:
    return name[2:].replace("-", "_")

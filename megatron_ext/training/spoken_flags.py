"""What a user said in tokenizer flags of several Megatron releases at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.legacy_types import OLD_FORMAT, UNSPOKEN

_OPPOSITES: Final = {
    "tokenizer_hf_include_special_tokens": "tokenizer_hf_no_include_special_tokens",
    "tokenizer_hf_use_fast": "tokenizer_hf_no_use_fast",
}
SPOKEN_DESTINATIONS: Final[frozenset[str]] = frozenset(
    {*_OPPOSITES, *_OPPOSITES.values(), OLD_FORMAT}
)
"""Attributes for which it matters whether the user said them: a release has its own defaults."""

Parse = Callable[[Sequence[str] | None, Any], tuple[Any, list[str]]]
"""A parser's ``parse_known_args``."""


def note_spoken(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` note which of ``SPOKEN_DESTINATIONS`` its user said, if it has defaults."""
    parse = parser.parse_known_args
    if not _with_defaults(parser):
        return

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        return parse_noting_spoken(parser, parse, args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def parse_noting_spoken(
    parser: argparse.ArgumentParser, parse: Parse, args: Sequence[str] | None, namespace: Any
) -> tuple[Any, list[str]]:
    """What ``parse`` gives, which is a ``parse_known_args`` of ``parser``'s.

    Those of ``SPOKEN_DESTINATIONS`` that hold a default of the parser's are named by the
    namespace's ``tokenizer_unspoken``, where the parser has any such default.
    """
    with _without_defaults(parser) as defaults:
        namespace, rest = parse(args, namespace)
    unspoken = [name for name in defaults if not hasattr(namespace, name)]
    for name in unspoken:
        setattr(namespace, name, defaults[name])
    if defaults:
        setattr(namespace, UNSPOKEN, unspoken)
    return namespace, rest


def spoken_of(namespace: Any) -> set[str]:
    """Those of ``SPOKEN_DESTINATIONS`` that the user said."""
    present = {name for name in SPOKEN_DESTINATIONS if hasattr(namespace, name)}
    return present - set(getattr(namespace, UNSPOKEN, ()))


def check_spoken(namespace: Any, *, has_legacy_tokenizers: bool = False) -> None:
    """Check that what the user said in flags of several releases goes together.

    Args:
        namespace: Parsed flags.
        has_legacy_tokenizers: Whether something honours ``--legacy-tokenizer``.

    Raises:
        ConfigError: Flags contradict each other.
    """
    spoken = spoken_of(namespace)
    for name, opposite in _OPPOSITES.items():
        if {name, opposite} <= spoken and getattr(namespace, name):
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
    """Actions of ``SPOKEN_DESTINATIONS`` that leave an attribute where nobody says anything."""
    return [
        action
        for action in parser._actions
        if action.dest in SPOKEN_DESTINATIONS and action.default is not argparse.SUPPRESS
    ]


@contextmanager
def _without_defaults(parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    """Take these defaults away, so that it shows which flags were given; the defaults."""
    actions = _with_defaults(parser)
    defaults = {action.dest: action.default for action in actions}
    # What set_defaults was told stands here as well.
    told = {name: parser._defaults.pop(name) for name in defaults if name in parser._defaults}
    try:
        for action in actions:
            action.default = argparse.SUPPRESS
        yield defaults
    finally:
        parser._defaults.update(told)
        for action in actions:
            action.default = defaults[action.dest]


def _flag(destination: str) -> str:
    return f"--{destination.replace('_', '-')}"

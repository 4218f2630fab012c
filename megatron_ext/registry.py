"""Registry of rows by name; a failed look-up lists the choices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Final, TypeVar

from megatron_ext.errors import ConfigError, UnknownNameError

Row = TypeVar("Row")

_MOST_NAMES: Final = 1_000
"""Names of a folder that a misspelled one is compared with."""

_ALMOST_A_PATH: Final = 0.75
"""Least similarity of a misspelled name of a file: numbered files look more alike than names."""


class Registry(Mapping[str, Row]):
    """A mapping that only grows, by ``register`` or ``registry[name] = row``.

    Args:
        noun: Noun for a row in error messages, such as ``"tokenizer library"``.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._rows: dict[str, Row] = {}

    def register(self, name: str, row: Row) -> Row:
        """Add ``row`` under ``name``.

        Raises:
            ConfigError: ``name`` is registered already.
        """
        if name in self._rows:
            raise ConfigError(f"the {self._noun} {name!r} is registered already")
        self._rows[name] = row
        return row

    def __setitem__(self, name: str, row: Row) -> None:
        self.register(name, row)

    def __getitem__(self, name: str) -> Row:
        try:
            return self._rows[name]
        except KeyError:
            raise UnknownNameError(
                f"unknown {self._noun}",
                got=repr(name),
                expected=f"one of {', '.join(self._rows)}",
                fix=did_you_mean(name, self._rows),
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def did_you_mean(name: object, choices: Mapping[str, object] | list[str]) -> str | None:
    """The hint ``did you mean 'x'?`` for the nearest choice, or None where none is near."""
    near = nearest(name, choices)
    return f"did you mean {near!r}?" if near else None


def with_near_path(fix: str | None, path: str | os.PathLike[str]) -> str | None:
    """``fix``, and the hint ``did you mean 'x'?`` where a file of nearly that name is beside it."""
    folder, name = os.path.split(os.fspath(path).rstrip("/"))
    try:
        with os.scandir(folder or ".") as entries:
            # One of that very name is there, and of another kind than what was looked for.
            names = [entry.name for entry in islice(entries, _MOST_NAMES) if entry.name != name]
    except (OSError, ValueError):
        return fix
    near = nearest(name, names, least=_ALMOST_A_PATH)
    if near is None:
        return fix
    hint = f"did you mean {os.path.join(folder, near)!r}?"
    return f"{fix}; {hint}" if fix else hint


def nearest(
    name: object, choices: Mapping[str, object] | list[str], *, least: float = 0.6
) -> str | None:
    """The choice that is spelled most like ``name``; None where none has the least similarity.

    One that alone begins with ``name`` is taken for it, however much longer it is.
    """
    begun = [choice for choice in choices if len(str(name)) > 2 and choice.startswith(str(name))]
    if len(begun) == 1:
        return begun[0]
    return next(iter(get_close_matches(str(name), list(choices), n=1, cutoff=least)), None)

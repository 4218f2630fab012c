"""Verbs with actions, each with flags of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from inspect import cleandoc
from typing import NamedTuple


class Action(NamedTuple):
    """One action of a verb."""

    add_flags: Callable[[argparse.ArgumentParser], None]

    run: Callable[[argparse.Namespace], object]
    """Function of the action; its docstring is the help."""


def add_actions(parser: argparse.ArgumentParser, actions: Mapping[str, Action]) -> None:
    """Add a subparser for each action, by name; the chosen name is ``action``."""
    parsers = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in actions.items():
        words = cleandoc(action.run.__doc__ or "")
        action.add_flags(
            parsers.add_parser(
                name,
                help=words.splitlines()[0],
                description=words,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
        )

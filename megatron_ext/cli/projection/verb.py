"""The verb ``megatron-ext projection`` and its actions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from inspect import cleandoc
from typing import Final, NamedTuple

from megatron_ext.cli.projection import build, convert, nemo_tools


class Action(NamedTuple):
    """One action of ``megatron-ext projection``."""

    add_flags: Callable[[argparse.ArgumentParser], None]

    run: Callable[[argparse.Namespace], object]
    """Function of the action; its docstring is the help."""


ACTIONS: Final = {
    "build": Action(build.add_build_flags, build.build),
    "inspect": Action(convert.add_inspect_flags, convert.inspect),
    "convert": Action(convert.add_convert_flags, convert.convert),
    "embed": Action(build.add_embed_flags, build.embed),
    **{
        name: Action(partial(nemo_tools.add_flags, name), tool)
        for name, tool in nemo_tools.TOOLS.items()
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subparser for each action."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in ACTIONS.items():
        words = cleandoc(action.run.__doc__ or "")
        action.add_flags(
            actions.add_parser(
                name,
                help=words.splitlines()[0],
                description=words,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
        )


def run(arguments: argparse.Namespace) -> None:
    """Run the action."""
    ACTIONS[arguments.action].run(arguments)

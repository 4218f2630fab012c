"""Which action of ``megatron-ext projection`` is meant."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, Final

ACTIONS: Final = (
    "build",
    "inspect",
    "convert",
    "embed",
    "minimal-projection-via-multitoken",
    "reapply-exact-map",
    "sort-and-cut-projection-matrix",
    "minimal-projection-generator",
    "build-projection-matrix",
)
"""Each is the module of its name, with ``add_arguments`` and ``run``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A parser for each action."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ACTIONS:
        action = _module(name)
        words = (action.__doc__ or "").strip()
        action.add_arguments(
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
    _module(arguments.action).run(arguments)


def _module(action: str) -> Any:
    return import_module(f"megatron_ext.cli.projection.{action.replace('-', '_')}")

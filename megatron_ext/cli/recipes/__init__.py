"""List the recipes, which are configurations for pairs of published models, or copy one to edit.

megatron-ext recipes ls
megatron-ext recipes cp qwen3_4b_to_llama3_2_1b run.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from megatron_ext.cli.output import check_new_file, write_rows
from megatron_ext.errors import UnknownNameError
from megatron_ext.files import write_text
from megatron_ext.registry import did_you_mean

_POINTER = "See docs/recipes.md."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("ls", help="list the recipes")
    copy = actions.add_parser("cp", help="copy a recipe")
    copy.add_argument("name", metavar="NAME", help="a name of megatron-ext recipes ls")
    copy.add_argument(
        "output", nargs="?", type=Path, metavar="FILE", help="new file; NAME.yaml when left out"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the list, or write the file and print its path."""
    if arguments.action == "ls":
        write_rows(summaries())
        return
    output = arguments.output or Path(f"{arguments.name}.yaml")
    text = recipe(arguments.name)
    check_new_file(output)
    write_text(output, text)
    sys.stdout.write(f"{output}\n")


def names() -> list[str]:
    """The recipes, by name."""
    folder = files(__package__)
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def recipe(name: str) -> str:
    """The text of a recipe.

    Raises:
        UnknownNameError: There is none of this name.
    """
    known = names()
    if name not in known:
        raise UnknownNameError(
            "there is no such recipe",
            got=repr(name),
            expected=f"one of {', '.join(known)}",
            fix=did_you_mean(name, known),
        )
    return (files(__package__) / f"{name}.yaml").read_text(encoding="utf-8")


def summaries() -> Iterator[tuple[str, str]]:
    """Each recipe with the comment that it begins with."""
    for name in names():
        comment = []
        for line in recipe(name).splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.removeprefix("#").strip())
        yield name, " ".join(comment).removesuffix(_POINTER).strip()

"""List what can be named: objectives, prompt formats, tasks, model families or recipes.

megatron-ext ls objectives
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from megatron_ext.cli.output import write_rows
from megatron_ext.cli.recipes import summaries

Rows = Iterator[tuple[str, str]]
"""Names, each with a line about it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the verb."""
    names = f"{{{','.join(LISTS)}}}"
    parser.add_argument("what", choices=LISTS, metavar=names, help="what to list")


def run(arguments: argparse.Namespace) -> None:
    """Print a line for each name."""
    write_rows(LISTS[arguments.what]())


def _objectives() -> Rows:
    from megatron_ext.losses import LOSS_REGISTRY

    for name in sorted(LOSS_REGISTRY):
        yield name, getattr(LOSS_REGISTRY[name], "summary", "")


def _formats() -> Rows:
    from megatron_ext.conversation import PROMPT_FORMAT_REGISTRY, PromptFormat

    for name, row in PROMPT_FORMAT_REGISTRY.items():
        if not isinstance(row, PromptFormat):
            yield name, ""
            continue
        template = "the tokenizer's own" if row.template is None else row.template
        tokens = f"; needs {' '.join(row.tokens)}" if row.tokens else ""
        yield name, f"template: {template}{tokens}"


def _tasks() -> Rows:
    from megatron_ext.evaluation.lm_eval_tasks import PREFIX
    from megatron_ext.evaluation.tasks import TASKS

    for name, make in TASKS.items():
        documentation = inspect.getdoc(getattr(make, "func", make)) or ""
        yield name, documentation.partition("\n")[0].replace("``", "")
    yield f"{PREFIX}NAME", "Any task of lm-evaluation-harness, by its name there."


def _families() -> Rows:
    from megatron_ext.huggingface.families import FAMILIES, UNSUPPORTED

    for name, family in FAMILIES.items():
        yield name, family.models
    for name, reason in UNSUPPORTED.items():
        yield name, f"not supported: {reason}"


LISTS: Final[Mapping[str, Callable[[], Rows]]] = {
    "objectives": _objectives,
    "formats": _formats,
    "tasks": _tasks,
    "families": _families,
    "recipes": summaries,
}
"""What can be listed, by the word that asks for it."""

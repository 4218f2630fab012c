"""Output of verbs: files, lists, warnings and their silence; and the choice of a run's teacher."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron_ext.errors import ConfigError, UnknownNameError, refused_by_system
from megatron_ext.files import why_not_writable, write_text

if TYPE_CHECKING:
    from megatron_ext.training.configuration.config import DistillConfig

PAGE: Final = "<!doctype html>"
"""Beginning of every page."""

MOST_NAMED: Final = 5
"""Most records and files that are named; the others are counted."""


_QUIET_LOGGERS: Final = ("megatron.core", "torch.utils.cpp_extension")
"""Loggers of libraries that warn about deprecated classes which runs need, and about a machine
without a GPU."""


def quiet_libraries() -> None:
    """Ignore warnings of torch and megatron-core about their own internals; ``-W`` shows them."""
    if sys.warnoptions:
        return
    warnings.simplefilter("ignore")
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add what every verb has, and every action of a verb with actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                add_output_flags(inner)
            return
    added = []
    if "--quiet" not in parser._option_string_actions:
        words = "leave out notes and progress on standard error"
        added.append(parser.add_argument("-q", "--quiet", action="store_true", help=words))
    words = "show where an error arose, and debug messages (or set MEGATRON_EXT_DEBUG=1)"
    added.append(parser.add_argument("--debug", action="store_true", help=words))
    # Of many flags the help is to show the few that a beginner needs.
    is_long = any(getattr(action, "is_advanced", False) for action in parser._actions)
    for action in added if is_long else ():
        action.is_advanced = True  # type: ignore[attr-defined]


@contextmanager
def as_told(arguments: argparse.Namespace, is_told: Callable[[Exception], bool]) -> Iterator[None]:
    """Run a verb as loud as ``--quiet`` and ``--debug`` say; errors are written all the same.

    Args:
        is_told: Whether an error is told in a line, so that its traceback is not shown anyway.
    """
    errors = sys.stderr
    is_debugged = arguments.debug or os.environ.get("MEGATRON_EXT_DEBUG") not in (None, "", "0")
    if is_debugged:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("megatron_ext").setLevel(logging.DEBUG)
    try:
        if not arguments.quiet:
            yield
        else:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
                yield
    except Exception as error:
        if is_debugged and is_told(error):
            traceback.print_exc(file=errors)
        raise


def check_new_file(path: Path) -> None:
    """Check that a file to write is not there yet.

    Raises:
        ConfigError: It is.
    """
    if path.exists():
        raise ConfigError(
            "the file exists", where=path, expected="a new one", fix="name another, or remove it"
        )


def check_output(path: Path, flag: str, *, begins: str = "") -> None:
    """Check, before work whose results it gets, that a file could be written.

    Args:
        begins: First characters of what is written. A file that is there is replaced if it begins
            so, too: a verb's results, but not a text that was to be read.

    Raises:
        ConfigError: It is a folder or another file, or its folder cannot be made or written to.
    """
    where, another = f"{flag} {path}", "name another file"
    reason = "a folder" if path.is_dir() else why_not_writable(path.parent)
    if reason is not None:
        fix = f"{another}, or change the permissions there"
        raise ConfigError("the file cannot be written", where=where, got=reason, fix=fix)
    if begins and path.is_file():
        with path.open("rb") as file:
            head = file.read(len(begins))
        if head and head != begins.encode():
            what = "the file holds something else, and is not written over"
            raise ConfigError(what, where=where, fix=f"{another}, or remove it")


def write_output(path: Path, text: str, flag: str) -> None:
    """Write a file atomically.

    Args:
        text: Contents of the file.
        flag: The flag that names the file, for errors.

    Raises:
        ConfigError: The file cannot be written.
    """
    with refused_by_system("cannot write the file", where=f"{flag} {path}", kind=ConfigError):
        write_text(path, text)


def write_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print names, each with a line about it, in two columns."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0) + 2
    sys.stdout.writelines(f"{name:<{width}}{about}".rstrip() + "\n" for name, about in listed)


def warn_left_out(records: Sequence[tuple[str, str]], more: str, files: Sequence[str]) -> None:
    """Name the first records left out and the first files skipped, on standard error.

    Args:
        records: Place and problem of each.
        more: Note about the others; empty if all are named.
        files: Files of unknown kind.
    """
    lines = [f"left out: {place}: {problem}" for place, problem in records[:MOST_NAMED]]
    lines += [more] if more else []
    lines += [f"skipped, of no known kind: {file}" for file in files[:MOST_NAMED]]
    sys.stderr.writelines(f"megatron-ext: {line}\n" for line in lines)


def named_teacher(config: DistillConfig, name: str | None, *, what_for: str) -> str:
    """Name of the teacher that a verb is applied to.

    Args:
        name: Name given by the user; None for the only teacher.
        what_for: Verb for the error "there is no teacher to ...".

    Raises:
        ConfigError: The run has no teacher, or several and no name is given.
        UnknownNameError: The run has no teacher of this name.
    """
    names = list(config.named_teachers)
    if not names:
        raise ConfigError(f"there is no teacher to {what_for}", fix="add a teacher section")
    if name is None and len(names) > 1:
        raise ConfigError(
            "there are several teachers", expected=f"--teacher and one of {', '.join(names)}"
        )
    if name is not None and name not in names:
        raise UnknownNameError(
            "there is no such teacher", got=name, expected=f"one of {', '.join(names)}"
        )
    return name or names[0]

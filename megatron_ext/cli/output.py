"""Files that verbs write, and what they say on standard error of the input that they leave out.

The teacher that a verb is about, of those that a run has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_ext.errors import ConfigError, UnknownNameError
from megatron_ext.files import write_text
from megatron_ext.training.config import DistillConfig

MOST_NAMED: Final = 5
"""Records and files that are named; more are counted."""


def write_output(path: Path, text: str, flag: str) -> None:
    """Write a file, whole or not at all.

    Args:
        path: The file.
        text: What it holds.
        flag: The flag that names it.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            "cannot write the file", got=error.strerror, where=f"{flag} {path}"
        ) from error


def warn_left_out(records: Sequence[tuple[str, str]], more: str, files: Sequence[str]) -> None:
    """Name the first records that were left out and the first files that were skipped.

    Args:
        records: Place and problem of each.
        more: Where to find the others; empty where all are named.
        files: Those of no known kind.
    """
    lines = [f"left out: {place}: {problem}" for place, problem in records[:MOST_NAMED]]
    lines += [more] if more else []
    lines += [f"skipped, of no known kind: {file}" for file in files[:MOST_NAMED]]
    sys.stderr.writelines(f"megatron-ext: {line}\n" for line in lines)


def named_teacher(config: DistillConfig, name: str | None, *, what_for: str) -> str:
    """Its name.

    Args:
        name: What the user gave; None: the one there is.
        what_for: What the verb would do with it: "there is no teacher to ...".

    Raises:
        ConfigError: There is none, or one of several is to be named.
        UnknownNameError: None of the run's is called so.
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

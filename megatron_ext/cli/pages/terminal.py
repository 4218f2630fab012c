"""A terminal that output is written for: whether it has colours, and columns of text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

BOLD: Final = "\x1b[1m"
BOLD_UNDERLINED: Final = "\x1b[1;4m"
WARNING: Final = "\x1b[1;38;5;221m"
GREY: Final = "\x1b[38;5;245m"
VIOLET: Final = "\x1b[38;5;141m"
BLUE: Final = "\x1b[38;5;75m"
ORANGE: Final = "\x1b[38;5;215m"
GREEN: Final = "\x1b[38;5;114m"
PINK: Final = "\x1b[38;5;211m"
TEAL: Final = "\x1b[38;5;80m"
RED: Final = "\x1b[38;5;203m"
_RESET: Final = "\x1b[0m"


def add_color_argument(parser: argparse._ActionsContainer) -> None:
    """Add the flag ``--color``."""
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="when to use colours"
    )


def use_colors(when: str) -> bool:
    """What ``--color`` asks for: always, never, or auto, on a terminal without ``NO_COLOR``."""
    if when == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return when == "always"


def styled(style: str, text: str, *, color: bool = True) -> str:
    """The text in a style; each line by itself, since pagers forget a style at the end of one."""
    if not color:
        return text
    return "\n".join(f"{style}{line}{_RESET}" if line else "" for line in text.split("\n"))


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[list[str]]:
    """The cells of each row, filled up to the width of their column.

    Args:
        rows: Of equally many cells; those beyond ``sides`` are left as they are.
        sides: ``<`` for each column that is set to the left, ``>`` for one to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{side}{width}" for side, width in zip(sides, widths, strict=False)]
    formats += [""] * (len(widths) - len(formats))
    return [[format(*cell) for cell in zip(row, formats, strict=True)] for row in rows]


def table_lines(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """The rows as lines of a table; ``sides`` as for ``columns``."""
    return ["  ".join(row).rstrip() for row in columns(rows, sides)]

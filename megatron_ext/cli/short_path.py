"""Paths on pages that are meant to be sent: without the folders of the machine that wrote them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

_ABSOLUTE: Final = re.compile(r"(?<![\w.:/])(?:/[^\s/:;,'\"]+){2,}")


def short_paths(paths: Iterable[str], *, least: int = 1) -> dict[str, str]:
    """The ends of paths: ``least`` components, or as many more as tell all paths apart."""
    parts = {path: [part for part in path.split(os.sep) if part] for path in paths}
    longest = max(map(len, parts.values()), default=0)
    for length in range(least, max(least, longest) + 1):
        short = {path: os.sep.join(its[-length:]) or path for path, its in parts.items()}
        if len(set(short.values())) == len(short):
            break
    return short


def in_words(text: str) -> str:
    """A sentence with the last two components of each absolute path in it."""
    return _ABSOLUTE.sub(lambda found: "/".join(found[0].split("/")[-2:]), text)

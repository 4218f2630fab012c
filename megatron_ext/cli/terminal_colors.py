"""Whether what is printed may have colours."""

from __future__ import annotations

import os
import sys


def use_colors(when: str) -> bool:
    """What ``--color`` asks for: always, never, or auto, on a terminal without ``NO_COLOR``."""
    if when == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return when == "always"

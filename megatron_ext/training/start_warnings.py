"""What a user should know of a run before it starts, on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def write_warnings(warnings: Iterable[str]) -> None:
    """A line for each, by one process of a launch."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
        sys.stderr.flush()

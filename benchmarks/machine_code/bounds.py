"""Bounds on the machine code of kernels, committed as JSON beside this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_COMMITTED: Final = json.loads(Path(__file__).with_name("bounds.json").read_text())

TRITON: Final[str] = _COMMITTED["triton"]
"""Version of Triton whose code the bounds are of: another one allocates other registers."""

BOUNDS: Final[dict[str, dict[str, float]]] = _COMMITTED["bounds"]
"""By launch: most ``instructions_a_column``, ``registers``, ``spill_store_bytes`` and
``shared_bytes``, least ``occupancy`` and ``wide_loads``, on every architecture."""

_LEAST: Final = ("occupancy", "wide_loads")


def broken(name: str, report: Mapping[str, Any]) -> list[str]:
    """Sentences on the bounds of a launch that its report does not keep."""
    found = []
    for key, bound in BOUNDS.get(name, {}).items():
        if key not in report:
            continue
        is_kept = report[key] >= bound if key in _LEAST else report[key] <= bound
        if not is_kept:
            word = "at least" if key in _LEAST else "at most"
            found.append(f"{name}: {key} is {report[key]}, {word} {bound} expected")
    return found

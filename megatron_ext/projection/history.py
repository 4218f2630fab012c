"""What was done to a projection after it was built, in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping

HISTORY = "history"
"""Metadata key: a JSON list of steps, the oldest first."""


def with_step(metadata: Mapping[str, str], step: str, **options: object) -> dict[str, str]:
    """``metadata`` with one more step in its history."""
    steps = [*json.loads(metadata.get(HISTORY, "[]")), {"step": step, **options}]
    return {**metadata, HISTORY: json.dumps(steps)}

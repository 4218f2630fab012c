"""The part of a row of the log that is about remote teachers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.teachers.remote_teacher import RemoteTeacher

SHARE = "teacher_waiting_share"


class TeacherWatch:
    """Reads how long remote teachers were waited for in a step, and what they sent.

    Waiting between steps, for an evaluation, is not counted.

    Args:
        teachers: By name; none is fine.
    """

    def __init__(self, teachers: Mapping[str, RemoteTeacher]) -> None:
        self._teachers = dict(teachers)
        self._waited_s = 0.0
        # The head, which comes once at the start, is not counted.
        self._at_start = {name: its.received_bytes for name, its in teachers.items()}

    def begin(self) -> None:
        """A step begins."""
        self._waited_s = self._all_waited_s()

    def row(self, *, seconds: float) -> dict[str, Any]:
        """``seconds/teacher_waiting`` and its share of the step, and what targets took so far.

        ``teacher_bytes_per_token/NAME`` is of all that has arrived, for all positions that were
        asked for, padding included.

        Args:
            seconds: The step's.
        """
        if not self._teachers:
            return {}
        waited = self._all_waited_s() - self._waited_s
        values = {
            f"teacher_bytes_per_token/{name}": (
                (its.received_bytes - self._at_start[name]) / its.received_tokens
            )
            for name, its in self._teachers.items()
            if its.received_tokens
        }
        return {"seconds/teacher_waiting": waited, SHARE: waited / seconds, **values}

    def shown(self, row: Mapping[str, Any]) -> dict[str, str]:
        """What of a row the progress line has."""
        return {"waiting": f"{row[SHARE]:.0%}"} if SHARE in row else {}

    def _all_waited_s(self) -> float:
        return sum(its.waited_s for its in self._teachers.values())

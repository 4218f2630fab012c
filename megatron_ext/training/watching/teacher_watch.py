"""What a row of the log says about teachers elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_ext.training.serving.elsewhere_teacher import ElsewhereTeacher

SHARE = "teacher_waiting_share"


class _Seen(NamedTuple):
    waited_s: float
    received_bytes: int
    received_tokens: int


class TeacherWatch:
    """Reads what each teacher elsewhere has taken and sent during a step.

    What comes between steps, for an evaluation or ahead, is not counted; nor is the head.

    Args:
        teachers: By name; none is fine.
    """

    def __init__(self, teachers: Mapping[str, ElsewhereTeacher]) -> None:
        self._teachers = dict(teachers)
        self._seen: dict[str, _Seen] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._seen = {name: _seen(teacher) for name, teacher in self._teachers.items()}

    def row(self, *, seconds: float) -> dict[str, Any]:
        """``seconds/teacher_waiting`` and its share of the step, and what targets took.

        ``teacher_bytes_per_token/NAME`` is of all that arrived for all positions that were asked
        for, padding included; where none arrived it is left out.

        Args:
            seconds: The step's.
        """
        if not self._teachers:
            return {}
        waited, values = 0.0, {}
        for name, teacher in self._teachers.items():
            before, now = self._seen[name], _seen(teacher)
            waited += now.waited_s - before.waited_s
            tokens = now.received_tokens - before.received_tokens
            if tokens:
                received = now.received_bytes - before.received_bytes
                values[f"teacher_bytes_per_token/{name}"] = received / tokens
        return {"seconds/teacher_waiting": waited, SHARE: waited / seconds, **values}

    def shown(self, row: Mapping[str, Any]) -> dict[str, str]:
        """What of a row the progress line has."""
        return {"waiting": f"{row[SHARE]:.0%}"} if SHARE in row else {}


def _seen(teacher: ElsewhereTeacher) -> _Seen:
    remote = teacher.remote
    return _Seen(remote.waited_s, remote.received_bytes, remote.received_tokens)

"""``RequestQueue``: the requests of a teacher server's students, answered by turns."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.flight import Frame
from megatron_ext.teachers.server_limits import ServerLimits

if TYPE_CHECKING:
    from megatron_ext.teachers.student_session import StudentSession


class Event(NamedTuple):
    """An event of a session: joined, asked, or left."""

    session: StudentSession
    kind: Literal["joined", "asked", "left"]
    frame: Frame | None = None
    """The student's request, for ``asked``."""


class RequestQueue:
    """Events of all sessions; the requests of those that have left are dropped.

    Args:
        limits: Most requests of a student that wait, and their bytes.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        self._news: deque[Event] = deque()
        self._asked: dict[StudentSession, deque[Frame]] = {}
        self._bytes: dict[StudentSession, int] = {}

    def join(self, session: StudentSession) -> None:
        """Add a student."""
        with self._changed:
            self._asked[session], self._bytes[session] = deque(), 0
            self._news.append(Event(session, "joined"))
            self._changed.notify_all()

    def leave(self, session: StudentSession) -> None:
        """Remove a student with its requests."""
        with self._changed:
            if self._asked.pop(session, None) is not None:
                self._news.append(Event(session, "left"))
            self._bytes.pop(session, None)
            self._changed.notify_all()

    def ask(self, session: StudentSession, frame: Frame) -> None:
        """Queue a request.

        Raises:
            DistributedError: Too many of the student's, or of all, wait already.
        """
        size = size_of(frame)
        limits = self._limits
        with self._changed:
            if session not in self._asked:
                return
            for what, got, most in (
                ("requests of a student", len(self._asked[session]) + 1, limits.queued),
                ("bytes of a student's requests", self._bytes[session] + size, limits.queued_bytes),
                ("bytes of requests", sum(self._bytes.values()) + size, limits.all_queued_bytes),
            ):
                if got > most:
                    raise DistributedError(
                        f"too many {what} wait at the teacher's server",
                        got=got,
                        expected=f"{most} at most",
                        fix="ask for less ahead: lower serving.prefetch",
                    )
            self._asked[session].append(frame)
            self._bytes[session] += size
            self._changed.notify_all()

    def wake(self) -> None:
        """Look again whether a session can take an answer."""
        with self._changed:
            self._changed.notify_all()

    def is_waiting(self, session: StudentSession) -> bool:
        """Whether a request of the session waits."""
        return bool(self._asked.get(session))

    def next(self, timeout_s: float) -> Event | None:
        """The next event; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._ready() is not None, timeout_s)
            if self._news:
                return self._news.popleft()
            session = self._ready()
            if session is None:
                return None
            frame = self._asked[session].popleft()
            self._bytes[session] -= size_of(frame)
            # The next turn is another student's.
            self._asked[session] = self._asked.pop(session)
            return Event(session, "asked", frame)

    def _ready(self) -> StudentSession | None:
        is_full = sum(it.unread_bytes for it in self._asked) >= self._limits.all_unread_bytes
        for session, asked in self._asked.items():
            if asked and session.can_take and not (is_full and session.unread_bytes):
                return session
        return None


def size_of(frame: Frame) -> int:
    """Bytes of a frame's tensors."""
    return sum(tensor.nbytes for tensor in frame.tensors.values())

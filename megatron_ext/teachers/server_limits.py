"""Limits of a teacher's server: sizes, the queue of requests, and open connections."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import unquote

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.flight import Frame, FrameLimits

if TYPE_CHECKING:
    from megatron_ext.teachers.student_session import StudentSession

_PARTS: Final = 4
"""Tensors of a microbatch: tokens, positions, labels and bounds."""
_DESCRIPTORS: Final = 5
"""File descriptors of a student: its socket and its shared memory."""
_OWN_DESCRIPTORS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Sizes, numbers and times; a student that goes beyond one of them is disconnected."""

    length: int = 1 << 20
    """Positions of a row: the teacher's sequence length."""

    rows: int = 4096
    """Rows of a microbatch."""

    microbatches: int = 8192
    """Microbatches of a request."""

    tokens: int = 1 << 22
    """Positions of a request."""

    header_bytes: int = 4 << 20
    """Bytes of a frame's header."""

    queued: int = 256
    """Requests of one student that wait."""

    queued_bytes: int = 1 << 30
    """Bytes of one student's requests that wait."""

    all_queued_bytes: int = 4 << 30
    """Bytes of all requests that wait."""

    unread_bytes: int = 256 << 20
    """Bytes of answers that one student has not read, from which on its requests wait."""

    all_unread_bytes: int = 4 << 30
    """The same of all students: then those wait that have not read everything."""

    heads: int = 4
    """Times that one student may ask for the head."""

    students: int = 512
    """Students at a time; fewer where the process may open few files."""

    strangers: int = 64
    """Connections without a call; the oldest beyond are closed."""

    handshake_s: float = 10.0
    """Seconds from a connection to its call, and from the call to ``ready``."""

    frame_s: float = 60.0
    """Seconds from the first bytes of a frame to its last."""

    @property
    def frame(self) -> FrameLimits:
        """Largest frame of a student."""
        tensor_bytes = _PARTS * 8 * self.tokens + 8 * self.microbatches
        return FrameLimits(self.header_bytes, tensor_bytes, tensors=_PARTS * self.microbatches)

    @property
    def most_strangers(self) -> int:
        """``strangers``, or fewer where the process may open few files."""
        return max(4, min(self.strangers, _open_files() // 8))

    @property
    def most_students(self) -> int:
        """``students``, or fewer where the process may open few files."""
        room = _open_files() - _OWN_DESCRIPTORS - self.most_strangers
        return max(2, min(self.students, room // _DESCRIPTORS))


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a session: joined, asked, or left."""

    session: StudentSession
    kind: Literal["joined", "asked", "left"]
    frame: Frame | None = None
    """The student's request, for ``asked``."""


class RequestQueue:
    """Events of all sessions; the requests of those that have left are dropped."""

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


_EVERY_S: Final = 0.25

Peer = tuple[str, int]
"""Host and port of the other side."""


def peer_of(text: str) -> Peer:
    """The peer in gRPC's notation, ``ipv4:127.0.0.1:41234``."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def end_connection(peer: str) -> None:
    """Shut down the socket of a student by its address in gRPC's notation."""
    with suppress(ValueError):
        _end({peer_of(peer)}, None)


class ConnectionSweep:
    """A thread that ends connections which have had no call for too long, or are too many.

    Args:
        port: The server's port.
        known: The peers whose calls run, read at each turn; it may end calls itself.
        most: Connections without a call.
        idle_s: Seconds that a connection may have none.
    """

    def __init__(
        self, port: int, known: Callable[[], set[Peer]], *, most: int, idle_s: float
    ) -> None:
        self._port = port
        self._known = known
        self._most = most
        self._idle_s = idle_s
        self._since: dict[Peer, float] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(_EVERY_S):
            with suppress(OSError):
                self._sweep()

    def _sweep(self) -> None:
        now = time.monotonic()
        found = set(_peers(self._port))
        # Calls are listed after sockets: one that has just begun is not taken for a stranger.
        strangers = found - self._known()
        self._since = {peer: self._since.get(peer, now) for peer in strangers}
        oldest = sorted(self._since, key=lambda peer: self._since[peer])
        too_many = oldest[: max(0, len(oldest) - self._most)]
        too_old = [peer for peer in oldest if now - self._since[peer] > self._idle_s]
        if too_many or too_old:
            _end({*too_many, *too_old}, self._port)


def _end(peers: set[Peer], port: int | None) -> None:
    for number in _descriptors():
        with _connection(number) as connection, suppress(OSError):
            if connection is not None and _peer(connection, port) in peers:
                connection.shutdown(socket.SHUT_RDWR)


def _peers(port: int) -> Iterator[Peer]:
    for number in _descriptors():
        with _connection(number) as connection:
            peer = connection and _peer(connection, port)
            if peer:
                yield peer


def _peer(connection: socket.socket, port: int | None) -> Peer | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        if port is not None and connection.getsockname()[1] != port:
            return None
        host, number, *_ = connection.getpeername()
    except OSError:
        return None
    return _plain(host), number


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:").partition("%")[0]


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        # None is left to read the folder with, so all are below the process's limit.
        return list(range(min(os.sysconf("SC_OPEN_MAX"), 1 << 16)))


@contextmanager
def _connection(number: int) -> Iterator[socket.socket | None]:
    """The socket of a descriptor, by a copy of it as long as one can be had."""
    own = number
    try:
        own = os.dup(number)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            yield None
            return
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        if own != number:
            os.close(own)
        yield None
        return
    try:
        yield connection
    finally:
        connection.detach()
        if own != number:
            os.close(own)

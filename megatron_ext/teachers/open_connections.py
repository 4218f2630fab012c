"""The open connections of a teacher's server, which gRPC neither lists nor ends.

``FlightServerBase`` takes no options for the age of a connection or a handshake, so sockets are
found among the process's descriptors.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import unquote

_EVERY_S: Final = 0.25

Peer = tuple[str, int]
"""Host and port of the other side."""


def peer_of(text: str) -> Peer:
    """The peer in gRPC's notation, ``ipv4:127.0.0.1:41234``."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def end_connection(peer: str) -> None:
    """Shut down a student's socket.

    Args:
        peer: The student's address in gRPC's notation.
    """
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

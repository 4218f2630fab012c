"""One connection between a student's rank and a teacher's, which several threads may send on."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Final

import torch

from megatron_ext.teachers.serving.frames import Frame, receive_frame, send_frame

BEAT_S: Final = 1.0
"""How often a server says that it lives, whatever else it does."""

_BEAT: Final = Frame("beat", {}, {})


class Wire:
    """Frames over a connected stream socket.

    Args:
        connected: Of any family; it belongs to the wire from now on.
        timeout_s: How long the other side may leave a message unread, or a question of ``greet``
            unanswered.

    Attributes:
        heard_at: When something last arrived, by ``time.monotonic``.
        received_bytes: All that has arrived.
    """

    def __init__(self, connected: socket.socket, *, timeout_s: float) -> None:
        connected.setblocking(True)
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _limit(connected, socket.SO_SNDTIMEO, timeout_s)
        # The connection reads and writes a descriptor of its own, of the same socket.
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self.heard_at = time.monotonic()
        self.received_bytes = 0

    def greet(self, authkey: bytes, *, is_server: bool) -> None:
        """Make sure, both ways, that the other side knows the key.

        Raises:
            AuthenticationError: It does not.
            EOFError: It closed the connection.
            OSError: It is gone, or does not answer.
        """
        _limit(self._socket, socket.SO_RCVTIMEO, self._timeout_s)
        if is_server:
            deliver_challenge(self._connection, authkey)
            answer_challenge(self._connection, authkey)
        else:
            answer_challenge(self._connection, authkey)
            deliver_challenge(self._connection, authkey)

    def send(self, frame: Frame) -> None:
        """Send all of it; one thread after another.

        Raises:
            OSError: The other side is gone, or has read nothing for the time-out.
        """
        with self._sending:
            send_frame(self._connection, frame)

    def beat(self) -> None:
        """Say that this side lives, unless it is saying something already or would have to wait.

        Raises:
            OSError: As of ``send``.
        """
        if self._sending.acquire(blocking=False):
            try:
                # One student that reads nothing must not keep the others from hearing.
                if self._can_send():
                    send_frame(self._connection, _BEAT)
            finally:
                self._sending.release()

    def receive(self, allocate: Callable[[int], torch.Tensor] | None = None) -> Frame:
        """The next frame that is no heartbeat; see ``receive_frame``."""
        while True:
            frame = receive_frame(self._connection, heard=self._heard, allocate=allocate)
            if frame.kind != _BEAT.kind:
                return frame

    def wait_without_limit(self) -> None:
        """From now on ``receive`` waits for as long as the connection stands."""
        _limit(self._socket, socket.SO_RCVTIMEO, 0)

    def finish(self) -> None:
        """Send no more.

        What was sent last arrives, as it might not where ``close`` throws unread messages away.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End it; whoever waits in ``receive`` or ``send`` gets an error. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._socket.close()

    def _can_send(self) -> bool:
        """Whether the kernel takes a few bytes at once."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(0))

    def _heard(self, count: int) -> None:
        self.heard_at = time.monotonic()
        self.received_bytes += count


def _limit(connected: socket.socket, option: int, seconds: float) -> None:
    """Let the kernel end reads or writes that wait; 0 for never."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, option, limit)

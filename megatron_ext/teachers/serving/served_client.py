"""A student as its teacher's server sees it: a thread that reads what it asks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from queue import SimpleQueue
from typing import Literal, NamedTuple

import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.serving.frames import Frame
from megatron_ext.teachers.serving.hello import Hello
from megatron_ext.teachers.serving.protocol import ANSWER, BYE, ERROR, HELLO, READY
from megatron_ext.teachers.serving.wire import Wire


class Event(NamedTuple):
    """Something that a student did."""

    client: ServedClient
    kind: Literal["joined", "asked", "left"]
    frame: Frame | None = None
    """What it asked."""


class ServedClient:
    """One connection, whose ``events`` the server's main thread works through.

    Args:
        connected: Just accepted.
        hello: What it is told first.
        timeout_s: How long it may take to greet, and leave an answer unread.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        hello: Hello,
        authkey: bytes,
        events: SimpleQueue[Event],
        timeout_s: float,
    ) -> None:
        self._wire = Wire(connected, timeout_s=timeout_s)
        self._hello = hello
        self._authkey = authkey
        self._events = events
        threading.Thread(target=self._run, name="student", daemon=True).start()

    def answer(self, number: int, payloads: Sequence[torch.Tensor]) -> None:
        """Send targets, uint8 each; nothing where the student is gone."""
        tensors = {str(index): payload.cpu() for index, payload in enumerate(payloads)}
        self.say(Frame(ANSWER, {"number": number}, tensors))

    def say(self, frame: Frame) -> None:
        """Send a frame; nothing where the student is gone."""
        try:
            self._wire.send(frame)
        except OSError:
            self._wire.close()

    def fail(self, error: BaseException) -> None:
        """Tell it why it gets no answer, and end the connection."""
        text = (str(error).splitlines() or [""])[0]
        is_own = isinstance(error, DistributedError)
        reason = text if is_own else f"{type(error).__name__}: {text}".removesuffix(": ")
        self.say(Frame(ERROR, {"reason": reason}, {}))
        self._wire.close()

    def beat(self) -> None:
        """Say that the server lives."""
        with suppress(OSError):
            self._wire.beat()

    def close(self) -> None:
        """End the connection."""
        self._wire.close()

    def _run(self) -> None:
        has_joined = False
        try:
            self._wire.greet(self._authkey, is_server=True)
            self._wire.send(Frame(HELLO, self._hello.values(), {}))
            # One that means another teacher leaves here.
            if self._wire.receive().kind != READY:
                return
            self._wire.wait_without_limit()
            has_joined = True
            self._events.put(Event(self, "joined"))
            while (frame := self._wire.receive()).kind != BYE:
                self._events.put(Event(self, "asked", frame))
        except DistributedError as error:
            self.fail(error)
        except (AuthenticationError, EOFError, OSError):
            # Strangers, and students that died, are no concern of the teacher's.
            pass
        finally:
            self._wire.close()
            if has_joined:
                self._events.put(Event(self, "left"))

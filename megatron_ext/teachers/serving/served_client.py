"""A student as its teacher's server sees it: a thread that reads what it asks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from queue import SimpleQueue
from typing import Any, Final, Literal, NamedTuple

import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.serving.channels.offers import CHANNELS, ChannelOffers
from megatron_ext.teachers.serving.channels.ring import SegmentRing
from megatron_ext.teachers.serving.channels.segment import use_device
from megatron_ext.teachers.serving.frames import Frame
from megatron_ext.teachers.serving.hello import Hello
from megatron_ext.teachers.serving.protocol import (
    ANSWER,
    BYE,
    ERROR,
    HELLO,
    READY,
    RETURNED,
)
from megatron_ext.teachers.serving.wire import Wire

_LAST_WORDS_S: Final = 2.0


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
        device: Of the server.
        timeout_s: How long it may take to greet, and leave an answer unread.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        hello: Hello,
        device: torch.device,
        authkey: bytes,
        events: SimpleQueue[Event],
        timeout_s: float,
    ) -> None:
        self._wire = Wire(connected, timeout_s=timeout_s)
        self._hello = hello
        self._device = device
        self._timeout_s = timeout_s
        self._ring: SegmentRing | None = None
        self._authkey = authkey
        self._events = events
        self._is_greeted = False
        self._has_joined = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="student", daemon=True)
        self._thread.start()

    @property
    def is_there(self) -> bool:
        """Whether the connection stands."""
        return self._thread.is_alive()

    def answer(self, number: int, payloads: Sequence[torch.Tensor]) -> None:
        """Send targets, uint8 each; nothing where the student is gone."""
        values: dict[str, Any] = {"number": number}
        if self._ring is None:
            tensors = {str(index): payload.cpu() for index, payload in enumerate(payloads)}
            self.say(Frame(ANSWER, values, tensors))
            return
        try:
            values["segment"] = self._written(payloads, self._ring)
        except OSError as error:
            self.fail(error)
            return
        self.say(Frame(ANSWER, values, {}))

    def say(self, frame: Frame) -> None:
        """Send a frame; nothing where the student is gone."""
        try:
            self._wire.send(frame)
        except OSError:
            self._wire.close()

    def fail(self, error: BaseException) -> None:
        """Tell it why it gets no answer, if it is past the greeting, and end the connection."""
        text = (str(error).splitlines() or [""])[0]
        is_own = isinstance(error, DistributedError)
        reason = text if is_own else f"{type(error).__name__}: {text}".removesuffix(": ")
        self._has_failed = True
        if not self._is_greeted:
            self._wire.close()
            return
        self.say(Frame(ERROR, {"reason": reason}, {}))
        self._wire.finish()

    def end(self) -> None:
        """End the connection and its thread: one that is left over at exit can bring torch down."""
        if self._has_failed:
            # Until the student has read why.
            self._thread.join(_LAST_WORDS_S)
        self._wire.close()
        self._thread.join(5)

    def beat(self) -> None:
        """Say that the server lives."""
        try:
            self._wire.beat()
        except OSError:
            self._wire.close()

    def _run(self) -> None:
        use_device(self._device)
        try:
            self._wire.greet(self._authkey, is_server=True)
            self._is_greeted = True
            if not self._is_meant():
                return
            self._wire.wait_without_limit()
            self._has_joined = True
            self._events.put(Event(self, "joined"))
            while (frame := self._wire.receive()).kind != BYE:
                if self._has_failed:
                    continue
                if frame.kind != RETURNED:
                    self._events.put(Event(self, "asked", frame))
                elif self._ring is not None:
                    self._ring.give_back(int(frame.values["segment"]))
        except DistributedError as error:
            self.fail(error)
        except (AuthenticationError, EOFError, OSError):
            # Strangers, and students that died, are no concern of the teacher's.
            pass
        finally:
            self._wire.close()
            if self._ring is not None:
                self._ring.close()
            if self._has_joined:
                self._events.put(Event(self, "left"))

    def _is_meant(self) -> bool:
        """Say hello; whether the student means this teacher, and through which channel."""
        offers = ChannelOffers(self._hello.form, self._device)
        self._wire.send(Frame(HELLO, {**self._hello.values(), "channels": offers.values}, {}))
        ready = self._wire.receive()
        channel = CHANNELS.get(str(ready.values.get("channel")))
        if channel is not None:
            self._ring = SegmentRing(channel, self._device, timeout_s=self._timeout_s)
        return ready.kind == READY

    def _written(self, payloads: Sequence[torch.Tensor], ring: SegmentRing) -> dict[str, Any]:
        """Write an answer to a segment; what the student needs to read it."""
        number, segment = ring.take(sum(payload.numel() for payload in payloads))
        start = 0
        for payload in payloads:
            segment.memory[start : start + payload.numel()].copy_(payload)
            start += payload.numel()
        if segment.memory.device.type == "cuda":
            torch.cuda.current_stream(segment.memory.device).synchronize()
        return {
            "number": number,
            "numbers": ring.numbers,
            "description": dict(segment.description),
        }

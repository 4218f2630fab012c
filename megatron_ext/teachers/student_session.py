"""A student as its teacher's server sees it: what it asks, and the stream of what it is told."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote

import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.channels import CHANNELS, ChannelOffers, SegmentRing, use_device
from megatron_ext.teachers.flight import Frame, fl, receive, to_chunks
from megatron_ext.teachers.messages import (
    ANSWER,
    BEAT,
    BEAT_S,
    BYE,
    ERROR,
    OFFERS,
    READY,
    RETURNED,
)
from megatron_ext.teachers.target_form import TargetForm

_LAST_WORDS_S: Final = 2.0


class Event(NamedTuple):
    """Something that a student did."""

    session: StudentSession
    kind: Literal["joined", "asked", "left"]
    frame: Frame | None = None
    """What it asked."""


class StudentSession:
    """One student, whose ``events`` the server's main thread works through.

    Args:
        peer: Its end of the connection, as gRPC names it.
        form: Of its targets.
        device: Of the server.
        timeout_s: How long it may leave an answer unread.
    """

    def __init__(
        self,
        peer: str,
        *,
        form: TargetForm,
        device: torch.device,
        events: SimpleQueue[Event],
        timeout_s: float,
    ) -> None:
        self._peer = peer
        self._form = form
        self._device = device
        self._events = events
        self._timeout_s = timeout_s
        self._outbox: SimpleQueue[Frame | None] = SimpleQueue()
        self._ring: SegmentRing | None = None
        self._writing_since: float | None = None
        self._has_joined = False
        self._has_failed = False
        self._has_left = threading.Event()
        self._has_ended = threading.Event()

    @property
    def is_there(self) -> bool:
        """Whether its connection stands."""
        return not self._has_ended.is_set()

    def run(self, reader: Any, writer: Any) -> None:
        """Say what it is told, and every second that the server lives, until one of them leaves.

        Args:
            reader: Of its stream; read in a thread of its own.
            writer: Of the server's.
        """
        hears = threading.Thread(target=self._hear, args=(reader,), name="student", daemon=True)
        hears.start()
        try:
            use_device(self._device)
            offers = ChannelOffers(self._form, self._device)
            self._write(writer, Frame(OFFERS, {"channels": offers.values}, {}))
            while (said := self._next()) is not None:
                self._write(writer, said)
        except fl.FlightError:
            # Students that died are no concern of the teacher's.
            pass
        finally:
            # The streams end with this call, so nobody may read them any more.
            if not self._has_left.wait(_LAST_WORDS_S):
                end_connection(self._peer)
            hears.join()
            if self._ring is not None:
                self._ring.close()
            self._has_ended.set()
            if self._has_joined:
                self._events.put(Event(self, "left"))

    def answer(self, number: int, payloads: Sequence[torch.Tensor]) -> None:
        """Send targets, uint8 each; nothing where the student is gone."""
        values: dict[str, Any] = {"number": number}
        if self._ring is None:
            tensors = {str(index): payload.cpu() for index, payload in enumerate(payloads)}
            self.say(Frame(ANSWER, values, tensors))
            return
        try:
            values["segment"] = _filled(payloads, self._ring)
        except OSError as error:
            self.fail(error)
            return
        self.say(Frame(ANSWER, values, {}))

    def say(self, frame: Frame) -> None:
        """Send a frame behind those that wait."""
        self._outbox.put(frame)

    def fail(self, error: BaseException) -> None:
        """Tell it why it gets no answer, and end the session."""
        text = (str(error).splitlines() or [""])[0]
        is_own = isinstance(error, DistributedError)
        reason = text if is_own else f"{type(error).__name__}: {text}".removesuffix(": ")
        self._has_failed = True
        self.say(Frame(ERROR, {"reason": reason}, {}))
        self._outbox.put(None)

    def end(self) -> None:
        """End the session; the student may first read what waits.

        A call that is left over when the process exits would keep it from ending.
        """
        self._outbox.put(None)
        if not self._has_ended.wait(2 * _LAST_WORDS_S):
            end_connection(self._peer)
            self._has_ended.wait(_LAST_WORDS_S)

    def check_reads(self) -> None:
        """End the session of a student that has left a message unread for the time-out."""
        since = self._writing_since
        if since is not None and time.monotonic() - since > self._timeout_s:
            end_connection(self._peer)

    def _next(self) -> Frame | None:
        """What to say next; None at the end."""
        try:
            return self._outbox.get(timeout=BEAT_S)
        except Empty:
            return Frame(BEAT, {}, {})

    def _write(self, writer: Any, frame: Frame) -> None:
        for batch, metadata in to_chunks(frame):
            self._writing_since = time.monotonic()
            writer.write_with_metadata(batch, metadata)
            self._writing_since = None

    def _hear(self, reader: Any) -> None:
        """Take what the student says until it leaves."""
        try:
            while (frame := receive(reader)).kind != BYE:
                self._heed(frame)
        except DistributedError as error:
            self.fail(error)
        except (fl.FlightError, StopIteration, OSError):
            pass
        finally:
            self._has_left.set()
            if self._ring is not None:
                self._ring.close()
            self._outbox.put(None)

    def _heed(self, frame: Frame) -> None:
        if frame.kind == READY:
            channel = CHANNELS.get(str(frame.values.get("channel")))
            if channel is not None:
                self._ring = SegmentRing(channel, self._device, timeout_s=self._timeout_s)
            self._has_joined = True
            self._events.put(Event(self, "joined"))
        elif frame.kind == RETURNED:
            if self._ring is not None:
                self._ring.give_back(int(frame.values["segment"]))
        elif not self._has_failed:
            self._events.put(Event(self, "asked", frame))


def _filled(payloads: Sequence[torch.Tensor], ring: SegmentRing) -> dict[str, Any]:
    """Write an answer to a segment; what the student needs to read it."""
    number, segment = ring.take(sum(payload.numel() for payload in payloads))
    start = 0
    for payload in payloads:
        segment.memory[start : start + payload.numel()].copy_(payload)
        start += payload.numel()
    if segment.memory.device.type == "cuda":
        torch.cuda.current_stream(segment.memory.device).synchronize()
    return {"number": number, "numbers": ring.numbers, "description": dict(segment.description)}


def end_connection(peer: str) -> None:
    """End the connection to a student that reads nothing; gRPC gives a server no way to.

    Args:
        peer: As gRPC names it, ``ipv4:127.0.0.1:41234``.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    for name in os.listdir("/dev/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with closing(found), suppress(OSError):
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            found_host, found_port, *_ = found.getpeername()
            if (found_host.removeprefix("::ffff:"), found_port) == (host.strip("[]"), int(port)):
                found.shutdown(socket.SHUT_RDWR)

"""``StudentSession``: a teacher server's connection to one student."""

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
    """An event of a session: joined, asked, or left."""

    session: StudentSession
    kind: Literal["joined", "asked", "left"]
    frame: Frame | None = None
    """The student's request, for ``asked``."""


class StudentSession:
    """Session of one student; the server's main thread processes its events.

    Args:
        peer: The student's address in gRPC's notation.
        form: Form of the targets.
        device: The server's device.
        timeout_s: Longest time that the student may leave an answer unread.
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
        """Whether the student is connected."""
        return not self._has_ended.is_set()

    def run(self, reader: Any, writer: Any) -> None:
        """Send queued frames, and a heartbeat every second, until either side leaves.

        Args:
            reader: Reader of the student's stream; read in a thread of its own.
            writer: Writer of the server's stream.
        """
        reading = threading.Thread(target=self._read, args=(reader,), name="student", daemon=True)
        reading.start()
        try:
            use_device(self._device)
            offers = ChannelOffers(self._form, self._device)
            self._write(writer, Frame(OFFERS, {"channels": offers.values}, {}))
            while (frame := self._next()) is not None:
                self._write(writer, frame)
        except fl.FlightError:
            # The death of a student does not concern the teacher.
            pass
        finally:
            # The streams end with this call and must not be read any more.
            if not self._has_left.wait(_LAST_WORDS_S):
                end_connection(self._peer)
            reading.join()
            if self._ring is not None:
                self._ring.close()
            self._has_ended.set()
            if self._has_joined:
                self._events.put(Event(self, "left"))

    def answer(self, number: int, payloads: Sequence[torch.Tensor]) -> None:
        """Send payloads, uint8; does nothing if the student is gone."""
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
        """Queue a frame."""
        self._outbox.put(frame)

    def fail(self, error: BaseException) -> None:
        """Send the student an error, and end the session."""
        text = (str(error).splitlines() or [""])[0]
        is_own = isinstance(error, DistributedError)
        reason = text if is_own else f"{type(error).__name__}: {text}".removesuffix(": ")
        self._has_failed = True
        self.say(Frame(ERROR, {"reason": reason}, {}))
        self._outbox.put(None)

    def end(self) -> None:
        """End the session once the student has read the queued frames.

        A call still running at exit would keep the process from ending.
        """
        self._outbox.put(None)
        if not self._has_ended.wait(2 * _LAST_WORDS_S):
            end_connection(self._peer)
            self._has_ended.wait(_LAST_WORDS_S)

    def check_reads(self) -> None:
        """End the session of a student that has left a frame unread for ``timeout_s``."""
        since = self._writing_since
        if since is not None and time.monotonic() - since > self._timeout_s:
            end_connection(self._peer)

    def _next(self) -> Frame | None:
        """The next frame to send; None at the end."""
        try:
            return self._outbox.get(timeout=BEAT_S)
        except Empty:
            return Frame(BEAT, {}, {})

    def _write(self, writer: Any, frame: Frame) -> None:
        for batch, metadata in to_chunks(frame):
            self._writing_since = time.monotonic()
            writer.write_with_metadata(batch, metadata)
            self._writing_since = None

    def _read(self, reader: Any) -> None:
        """Handle the student's frames until it leaves."""
        try:
            while (frame := receive(reader)).kind != BYE:
                self._handle(frame)
        except DistributedError as error:
            self.fail(error)
        except (fl.FlightError, StopIteration, OSError):
            pass
        finally:
            self._has_left.set()
            if self._ring is not None:
                self._ring.close()
            self._outbox.put(None)

    def _handle(self, frame: Frame) -> None:
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
    """Copy an answer to a segment; returns the values with which the student reads it."""
    number, segment = ring.take(sum(payload.numel() for payload in payloads))
    start = 0
    for payload in payloads:
        segment.memory[start : start + payload.numel()].copy_(payload)
        start += payload.numel()
    if segment.memory.device.type == "cuda":
        torch.cuda.current_stream(segment.memory.device).synchronize()
    return {"number": number, "numbers": ring.numbers, "description": dict(segment.description)}


def end_connection(peer: str) -> None:
    """Shut down a student's socket, connection by its address: gRPC has no call for it.

    Args:
        peer: The student's address in gRPC's notation, ``ipv4:127.0.0.1:41234``.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    for name in os.listdir("/dev/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with closing(connection), suppress(OSError):
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            host_found, found_port, *_ = connection.getpeername()
            if (host_found.removeprefix("::ffff:"), found_port) == (host.strip("[]"), int(port)):
                connection.shutdown(socket.SHUT_RDWR)

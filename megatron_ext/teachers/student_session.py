"""``StudentSession``: a teacher server's connection to one student."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.channels import CHANNELS, FLIGHT, ChannelOffers, SegmentRing, use_device
from megatron_ext.teachers.flight import Frame, fl, receive, to_chunks
from megatron_ext.teachers.messages import (
    ANSWER,
    BEAT,
    BEAT_S,
    BYE,
    ERROR,
    HEAD,
    OFFERS,
    READY,
    REQUEST,
    RETURNED,
)
from megatron_ext.teachers.server_limits import RequestQueue, ServerLimits, end_connection, size_of
from megatron_ext.teachers.target_form import TargetForm

_LAST_WORDS_S: Final = 2.0


class StudentSession:
    """Session of one student; the server's main thread processes its events.

    Args:
        peer: The student's address in gRPC's notation.
        requests: Queue that the session adds its requests to.
        timeout_s: Longest time that the student may leave an answer unread.

    Attributes:
        unread_bytes: Bytes of frames that the student has not read.
    """

    def __init__(
        self,
        peer: str,
        *,
        form: TargetForm,
        device: torch.device,
        requests: RequestQueue,
        limits: ServerLimits,
        timeout_s: float,
    ) -> None:
        self._peer = peer
        self._form = form
        self._device = device
        self._requests = requests
        self._limits = limits
        self._timeout_s = timeout_s
        self._outbox: SimpleQueue[Frame | None] = SimpleQueue()
        self._ring: SegmentRing | None = None
        self._began = time.monotonic()
        self._writing_since: float | None = None
        self._reading_since: float | None = None
        self._blocked_since: float | None = None
        self._failed_since: float | None = None
        self._offered: set[str] = {FLIGHT}
        self._heads = 0
        self.unread_bytes = 0
        self._counting = threading.Lock()
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

        The student's stream is read in a thread of its own.
        """
        reading = threading.Thread(target=self._read, args=(reader,), name="student", daemon=True)
        reading.start()
        try:
            use_device(self._device)
            offers = ChannelOffers(self._form, self._device)
            self._offered |= set(offers.values)
            self._write(writer, Frame(OFFERS, {"channels": offers.values}, {}))
            while (frame := self._next()) is not None:
                self._write(writer, frame)
                self._count(-size_of(frame))
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
            self._requests.leave(self)

    def answer(self, number: int, payloads: Sequence[torch.Tensor]) -> None:
        """Send payloads, uint8; does nothing if the student is gone."""
        values: dict[str, Any] = {"number": number}
        if self._ring is None or not payloads:
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
        self._count(size_of(frame))
        self._outbox.put(frame)

    def fail(self, error: BaseException) -> None:
        """Send the student an error, and end the session."""
        text = (str(error).splitlines() or [""])[0]
        is_own = isinstance(error, DistributedError)
        reason = text if is_own else f"{type(error).__name__}: {text}".removesuffix(": ")
        if isinstance(error, KeyboardInterrupt):
            reason = "the end of its server by Ctrl-C"
        self._has_failed = True
        self._failed_since = self._failed_since or time.monotonic()
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

    @property
    def can_take(self) -> bool:
        """Whether an answer can be sent without waiting for the student."""
        is_free = self._ring is None or self._ring.has_room
        is_read = not self.unread_bytes or self.unread_bytes < self._limits.unread_bytes
        return is_free and is_read and not self._has_failed

    def check(self) -> None:
        """End the connection of a student that has passed a deadline; called every moment."""
        now = time.monotonic()
        is_blocked = self._requests.is_waiting(self) and not self.can_take
        self._blocked_since = (self._blocked_since or now) if is_blocked else None
        joining_since = None if self._has_joined else self._began
        for since, most_s in (
            (joining_since, self._limits.handshake_s),
            (self._reading_since, self._limits.frame_s),
            (self._writing_since, self._timeout_s),
            (self._blocked_since, self._timeout_s),
            (self._failed_since, 2 * _LAST_WORDS_S),
        ):
            if since is not None and now - since > most_s:
                end_connection(self._peer)
                return

    def _next(self) -> Frame | None:
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
        try:
            while (frame := self._received(reader)).kind != BYE:
                self._handle(frame)
        except (fl.FlightError, StopIteration, OSError):
            pass
        except Exception as error:
            # Whatever a student sends ends its own session alone.
            self.fail(error)
        finally:
            self._has_left.set()
            if self._ring is not None:
                self._ring.close()
            self._outbox.put(None)

    def _received(self, reader: Any) -> Frame:
        def begin(_: int) -> None:
            self._reading_since = self._reading_since or time.monotonic()

        try:
            return receive(reader, on_bytes=begin, limits=self._limits.frame)
        finally:
            self._reading_since = None

    def _count(self, size: int) -> None:
        with self._counting:
            self.unread_bytes += size
        if size < 0:
            self._requests.wake()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == READY:
            self._join(frame.values.get("channel"))
        elif frame.kind == RETURNED:
            number = frame.values.get("segment")
            if self._ring is None or type(number) is not int:
                raise _unexpected(f"{RETURNED} of segment {str(number)[:40]}")
            self._ring.give_back(number)
            self._requests.wake()
        elif frame.kind not in (REQUEST, HEAD) or not self._has_joined:
            raise _unexpected(frame.kind[:40])
        elif not self._has_failed:
            self._heads += frame.kind == HEAD
            if self._heads > self._limits.heads:
                raise _unexpected(f"{HEAD} {self._heads} times")
            self._requests.ask(self, frame)

    def _join(self, channel: object) -> None:
        if self._has_joined or not isinstance(channel, str) or channel not in self._offered:
            raise _unexpected(f"{READY} for the channel {str(channel)[:40]}")
        if channel != FLIGHT:
            self._ring = SegmentRing(CHANNELS[channel], self._device, timeout_s=self._timeout_s)
        self._has_joined = True
        self._requests.join(self)


def _unexpected(got: str) -> DistributedError:
    return DistributedError(
        "a student sent what the teacher's server does not expect", got=ascii(got)[:80]
    )


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

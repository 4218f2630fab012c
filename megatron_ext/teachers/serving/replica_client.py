"""A replica of a teacher elsewhere as a student sees it: a thread that reads its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.serving.channels.offers import CHANNELS, TCP
from megatron_ext.teachers.serving.channels.ring import OpenSegments
from megatron_ext.teachers.serving.channels.segment import use_device
from megatron_ext.teachers.serving.frames import Frame
from megatron_ext.teachers.serving.known_server import KnownServer
from megatron_ext.teachers.serving.payload import Fields, fields_of, payload_size
from megatron_ext.teachers.serving.protocol import ANSWER, BYE, ERROR, HEAD, RETURNED
from megatron_ext.teachers.serving.request import Request
from megatron_ext.teachers.serving.wire import Wire
from megatron_ext.teachers.targets.form import TargetForm
from megatron_ext.teachers.token_rows import TokenRows

_POLL_S: Final = 0.2


class ReplicaClient:
    """Asks, and keeps the answers until they are taken.

    Args:
        wire: Greeted, to a server whose teacher is known to be the right one.
        server: Whose answers they are.
        form: Of its targets.
        device: Where the answers will be needed.
        channel: What ``choose`` found.

    Attributes:
        channel: As given.
        received_tokens: Positions whose targets have arrived.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        server: KnownServer,
        form: TargetForm,
        device: torch.device,
        channel: str,
    ) -> None:
        self._wire = wire
        self._server = server
        self._form = form
        self._device = device
        self.channel = channel
        self._segments = OpenSegments(CHANNELS[channel], device) if channel != TCP else None
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        self._answers: dict[int, list[Fields]] = {}
        self._head: torch.Tensor | None = None
        self._failure: str | None = None
        self._changed = threading.Condition()
        self.received_tokens = 0
        self._shared_bytes = 0
        self._thread = threading.Thread(
            target=self._read, name=f"teacher {server.name}", daemon=True
        )
        self._thread.start()

    @property
    def received_bytes(self) -> int:
        """All that has arrived, by whichever channel."""
        return self._wire.received_bytes + self._shared_bytes

    def ask(self, number: int, rows: Sequence[TokenRows]) -> None:
        """Send a request; its answer is read while the caller does other things.

        Raises:
            DistributedError: The teacher is gone.
        """
        self._shapes[number] = [tuple(its.tokens.shape) for its in rows]
        self._send(Request(number, rows).to_frame(self._form.kind))

    def take(self, number: int) -> list[Fields]:
        """The answer to a request, one of each microbatch; waits for it.

        Raises:
            DistributedError: The teacher is gone, or does not answer.
        """
        self._wait(lambda: number in self._answers)
        return self._answers.pop(number)

    def head(self) -> torch.Tensor:
        """[V, D] on the CPU.

        Raises:
            DistributedError: As of ``take``.
        """
        self._send(Frame(HEAD, {}, {}))
        self._wait(lambda: self._head is not None)
        head, self._head = self._head, None
        assert head is not None
        return head

    def close(self) -> None:
        """Leave."""
        with suppress(OSError):
            self._wire.send(Frame(BYE, {}, {}))
        self._wire.close()
        self._thread.join(5)

    def _send(self, frame: Frame) -> None:
        try:
            self._wire.send(frame)
        except BlockingIOError:
            raise self._silent() from None
        except OSError:
            # The reading thread finds out why.
            self._wait(lambda: False)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        # A student that was stopped itself first reads what has come meanwhile.
        started = time.monotonic()
        with self._changed:
            while not is_there():
                if self._failure is not None:
                    raise self._server.gone(self._failure)
                since = max(started, self._wire.heard_at)
                if time.monotonic() - since > self._server.timeout_s:
                    raise self._silent()
                self._changed.wait(_POLL_S)

    def _silent(self) -> DistributedError:
        seconds = time.monotonic() - self._wire.heard_at
        return self._server.silent(seconds)

    def _read(self) -> None:
        reason = "connection closed without a word"
        try:
            use_device(self._device)
            while True:
                frame = self._wire.receive(self._allocate)
                if frame.kind == ERROR:
                    reason = str(frame.values.get("reason"))
                    break
                if frame.kind == ANSWER:
                    self._answered(frame)
                elif frame.kind == HEAD:
                    with self._changed:
                        self._head = frame.tensors["head"]
                        self._changed.notify_all()
        except (EOFError, OSError):
            reason = self._server.why_gone() or reason
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        self._wire.close()
        if self._segments is not None:
            self._segments.close()
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def _answered(self, frame: Frame) -> None:
        number = int(frame.values["number"])
        shapes = self._shapes.pop(number)
        payloads = (
            frame.tensors.values()
            if self._segments is None
            else self._copied(self._segments, frame.values["segment"], shapes)
        )
        found = [
            fields_of(payload, self._form, shape)
            for payload, shape in zip(payloads, shapes, strict=True)
        ]
        with self._changed:
            self._answers[number] = found
            self.received_tokens += sum(rows * length for rows, length in shapes)
            self._changed.notify_all()

    def _copied(
        self,
        segments: OpenSegments,
        segment: Mapping[str, Any],
        shapes: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Payloads out of shared memory, which the server gets back at once."""
        number = int(segment["number"])
        memory = segments.memory(number, segment)
        payloads, start = [], 0
        for shape in shapes:
            size = payload_size(self._form, shape)
            on_device = memory.device.type == "cuda"
            payload = (
                torch.empty(size, dtype=torch.uint8, device=self._device)
                if on_device
                else self._allocate(size)
            )
            payloads.append(payload.copy_(memory[start : start + size]))
            start += size
        if memory.device.type == "cuda":
            for device in {memory.device, self._device}:
                torch.cuda.current_stream(device).synchronize()
        self._shared_bytes += start
        self._wire.send(Frame(RETURNED, {"segment": number}, {}))
        return payloads

    def _allocate(self, size: int) -> torch.Tensor:
        # What is in page-locked memory goes to the device while other things are computed.
        is_pinned = self._device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)

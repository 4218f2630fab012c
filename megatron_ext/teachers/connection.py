"""``Connection``: a student's connection to one replica of a remote teacher, read by a thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any, Final

import torch

from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.channels import CHANNELS, FLIGHT, OpenSegments, choose, use_device
from megatron_ext.teachers.flight import SCHEMA, Frame, fl, from_bytes, receive, to_bytes, to_chunks
from megatron_ext.teachers.formed_targets import Fields
from megatron_ext.teachers.messages import (
    ANSWER,
    BYE,
    ERROR,
    HEAD,
    HELLO,
    OFFERS,
    READY,
    RETURNED,
    Hello,
    Request,
    fields_of,
    payload_size,
)
from megatron_ext.teachers.remote_server import RemoteServer
from megatron_ext.teachers.target_form import TargetForm

_POLL_S: Final = 0.2
_LAST_WORDS_S: Final = 5.0


class Connection:
    """Sends requests, and holds the answers until they are taken.

    Args:
        form: Form of the targets that the run reads.
        identity: Values that the targets depend on; a server with other values is refused.
        device: Device on which the targets are needed.
        deadline: Time by ``time.monotonic`` until which the server may start to listen.

    Attributes:
        channel: Channel of the targets: ``cuda_ipc``, ``shared_memory`` or ``flight``.
        received_bytes: Bytes received, by whichever channel.
        received_tokens: Positions whose targets were received.
        waited_s: Seconds spent waiting for answers.

    Raises:
        ConfigError: The server has another teacher, token or certificate, or TLS is missing.
        DistributedError: The server does not answer, or its process has ended.
    """

    def __init__(
        self,
        server: RemoteServer,
        *,
        form: TargetForm,
        identity: Mapping[str, str | int],
        device: torch.device,
        deadline: float,
    ) -> None:
        self._server = server
        self._form = form
        self._device = device
        self._numbers = itertools.count()
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        self._answers: dict[int, list[Fields]] = {}
        self._offers: Mapping[str, Any] | None = None
        self._head: torch.Tensor | None = None
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._last_received_at = time.monotonic()
        self._outbox: SimpleQueue[Frame | None] = SimpleQueue()
        self._segments: OpenSegments | None = None
        self.channel = FLIGHT
        self.received_bytes = self.received_tokens = 0
        self.waited_s = 0.0
        self._flight = server.connected(deadline)
        try:
            self._check(form, identity)
            self._writer, self._reader = self._flight.do_exchange(
                fl.FlightDescriptor.for_command(b""), server.options(None)
            )
        except BaseException:
            self._flight.close()
            raise
        self._threads = [
            threading.Thread(target=task, name=f"teacher {server.name}", daemon=True)
            for task in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def ask(self, rows: Sequence[TokenRows]) -> int:
        """Request the targets of microbatches; returns the number for ``answer``, at once."""
        number = next(self._numbers)
        self._shapes[number] = [tuple(its.tokens.shape) for its in rows]
        self._outbox.put(Request(number, rows).to_frame(self._form.kind))
        return number

    def answer(self, number: int) -> list[Fields]:
        """Wait for the fields [B, T, ...] of each microbatch of a request; on the host.

        Raises:
            DistributedError: The teacher is gone, or does not answer.
        """
        started = time.perf_counter()
        try:
            self._wait(lambda: number in self._answers)
        finally:
            self.waited_s += time.perf_counter() - started
        return self._answers.pop(number)

    def head(self) -> torch.Tensor:
        """Request the teacher's head [V, D], on the CPU.

        Raises:
            DistributedError: See ``answer``.
        """
        self._outbox.put(Frame(HEAD, {}, {}))
        self._wait(lambda: self._head is not None)
        head, self._head = self._head, None
        assert head is not None
        return head

    def close(self) -> None:
        """Say goodbye to the server, and close the stream."""
        self._outbox.put(Frame(BYE, {}, {}))
        self._outbox.put(None)
        self._threads[1].join(_LAST_WORDS_S if self._failure is None else 0)
        self._reader.cancel()
        for thread in self._threads:
            thread.join(_LAST_WORDS_S)
        with suppress(fl.FlightError, OSError):
            # Arrow prints the error of a stream that is not closed.
            self._writer.close()
        self._flight.close()

    def _check(self, form: TargetForm, identity: Mapping[str, str | int]) -> None:
        action = fl.Action(HELLO, to_bytes(Frame(HELLO, {}, {})))
        try:
            (reply,) = self._flight.do_action(action, self._server.options(self._server.timeout_s))
        except fl.FlightError as error:
            raise self._server.refused(error) from error
        where = self._server.address
        hello = Hello.of(from_bytes(reply.body.to_pybytes()).values, where=where)
        hello.check(form=form, identity=identity, name=self._server.name, where=where)

    def _begin(self) -> None:
        """Choose a channel from the server's offers."""
        self._wait(lambda: self._offers is not None)
        assert self._offers is not None
        self.channel = choose(self._offers, self._device)
        if self.channel != FLIGHT:
            self._segments = OpenSegments(CHANNELS[self.channel], self._device)
        self._outbox.put(Frame(READY, {"channel": self.channel}, {}))

    def _wait(self, is_there: Callable[[], bool]) -> None:
        # A student that was itself suspended first reads what has arrived meanwhile.
        started = time.monotonic()
        with self._changed:
            while not is_there():
                if self._failure is not None:
                    raise self._server.gone(self._failure)
                if time.monotonic() - max(started, self._last_received_at) > self._server.timeout_s:
                    raise self._server.silent(time.monotonic() - self._last_received_at)
                self._changed.wait(_POLL_S)

    def _write(self) -> None:
        """Thread that sends frames: a suspended server reads nothing, which blocks the sender."""
        try:
            self._writer.begin(SCHEMA)
            while (frame := self._outbox.get()) is not None:
                for batch, metadata in to_chunks(frame):
                    self._writer.write_with_metadata(batch, metadata)
        except (fl.FlightError, OSError):
            # The reading thread reports the cause.
            return

    def _read(self) -> None:
        """Thread that reads the server's stream to its end."""
        try:
            use_device(self._device)
            while True:
                frame = receive(self._reader, on_bytes=self._count_bytes, allocate=self._allocate)
                if frame.kind == ERROR:
                    reason = str(frame.values.get("reason"))
                    break
                self._take(frame)
        except Exception as error:
            reason = self._server.reason(error)
        if self._segments is not None:
            self._segments.close()
        with self._changed:
            self._failure = reason
            self._changed.notify_all()
        self._outbox.put(None)
        # The server waits for it.
        self._reader.cancel()

    def _take(self, frame: Frame) -> None:
        with self._changed:
            if frame.kind == ANSWER:
                number = int(frame.values["number"])
                self._answers[number] = self._fields(frame, self._shapes.pop(number))
            elif frame.kind == HEAD:
                self._head = frame.tensors["head"]
            elif frame.kind == OFFERS:
                self._offers = frame.values["channels"]
            self._changed.notify_all()

    def _fields(self, frame: Frame, shapes: Sequence[Sequence[int]]) -> list[Fields]:
        payloads = list(frame.tensors.values())
        if self._segments is not None and shapes:
            payloads = self._copied(self._segments, frame.values["segment"], shapes)
        self.received_tokens += sum(rows * length for rows, length in shapes)
        return [
            fields_of(payload, self._form, shape)
            for payload, shape in zip(payloads, shapes, strict=True)
        ]

    def _copied(
        self, segments: OpenSegments, segment: Mapping[str, Any], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Copy payloads out of shared memory, which is returned to the server at once."""
        number = int(segment["number"])
        memory = segments.memory(number, segment)
        payloads, start = [], 0
        for shape in shapes:
            size = payload_size(self._form, shape)
            if memory.device.type == "cuda":
                payload = torch.empty(size, dtype=torch.uint8, device=self._device)
            else:
                payload = self._allocate(size)
            payloads.append(payload.copy_(memory[start : start + size]))
            start += size
        if memory.device.type == "cuda":
            for device in {memory.device, self._device}:
                torch.cuda.current_stream(device).synchronize()
        self.received_bytes += start
        self._outbox.put(Frame(RETURNED, {"segment": number}, {}))
        return payloads

    def _count_bytes(self, count: int) -> None:
        self._last_received_at = time.monotonic()
        self.received_bytes += count

    def _allocate(self, size: int) -> torch.Tensor:
        # Page-locked memory is copied to the device while other work goes on.
        is_pinned = self._device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def own_addresses(addresses: Sequence[str], *, client: int, clients: int) -> list[str]:
    """The addresses, one a teacher replica, that the student replica ``client`` connects to."""
    if len(addresses) >= clients:
        return list(addresses[client::clients])
    return [addresses[client % len(addresses)]]


def connect(
    servers: Sequence[RemoteServer],
    *,
    form: TargetForm,
    identity: Mapping[str, str | int],
    device: torch.device,
) -> list[Connection]:
    """Connect to each of ``servers``, replicas of one teacher; see ``Connection``."""
    with ExitStack() as stack:
        connections = []
        deadline = time.monotonic() + max(server.timeout_s for server in servers)
        for server in servers:
            connections.append(
                Connection(server, form=form, identity=identity, device=device, deadline=deadline)
            )
            stack.callback(connections[-1].close)
        stack.pop_all()
    return connections

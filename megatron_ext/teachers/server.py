"""``TeacherServer``: a teacher that answers students of other processes.

B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.base import InputRows, Teacher, TokenRows
from megatron_ext.teachers.flight import Frame, from_bytes, to_bytes
from megatron_ext.teachers.formed_targets import FormedTargets
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.messages import HEAD, HELLO, REQUEST, Hello, Request, payload_of
from megatron_ext.teachers.server_limits import RequestQueue, ServerLimits
from megatron_ext.teachers.student_session import StudentSession

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRanks:
    """The ranks of one teacher replica, as seen from this rank."""

    device: torch.device

    group: ProcessGroup | None = None
    """All ranks of the replica (tensor and pipeline parallel); None for a single rank."""

    main: int = 0
    """Rank in the default group that listens and answers; on the last stage, as targets are."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is ``main``."""
        return self.group is None or dist.get_rank() == self.main

    def broadcast(self, content: bytes | None) -> bytes:
        """``content`` of the main rank, on every rank.

        Collectives: one broadcast over the replica, and a second one unless the content is empty.
        """
        if self.group is None:
            assert content is not None
            return content
        size = torch.tensor([len(content or b"")], device=self.device)
        dist.broadcast(size, src=self.main, group=self.group)
        length = int(size)
        if not length:
            return b""
        if content is None:
            buffer = torch.empty(length, dtype=torch.uint8, device=self.device)
        else:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        dist.broadcast(buffer, src=self.main, group=self.group)
        return content if content is not None else buffer.cpu().numpy().tobytes()


_END: Final = to_bytes(Frame("end", {}, {}))
_IDLE_S: Final = 2.0
"""Seconds between broadcasts of an idle replica, so that collectives do not time out."""


class TeacherServer:
    """The server of one teacher replica; constructed on each of its ranks.

    Several students may connect and leave at any time; requests are answered in turn, and no state
    is kept between them.

    Args:
        teacher: This rank's part of the teacher.
        formed: Converter of targets to the form that is sent.
        head: Collective that gathers the head [V, D] on the CPU of the main rank; None if the form
            is not ``hidden``.
        identity: Values that the targets depend on, by their names in error messages.
        timeout: Longest time that a student may leave an answer unread, and with
            ``until_client_leaves`` that the first student may take to connect.
        on_idle: Called every few seconds without a request, and before each answer.
        limits: What students may take; the usual ones when left out.
    """

    def __init__(
        self,
        teacher: Teacher,
        *,
        name: str,
        formed: FormedTargets,
        head: Callable[[], torch.Tensor | None] | None,
        identity: Mapping[str, str | int],
        ranks: ReplicaRanks,
        timeout: timedelta,
        on_idle: Callable[[], object] = lambda: None,
        limits: ServerLimits | None = None,
    ) -> None:
        self._teacher = teacher
        self._formed = formed
        self._head = head
        self._ranks = ranks
        self._timeout_s = timeout.total_seconds()
        self._on_idle = on_idle
        self._hello = Hello(teacher=name, form=formed.form, identity=identity)
        self.limits = limits or ServerLimits()
        self._requests: RequestQueue = RequestQueue(self.limits)
        self._sessions: list[StudentSession] = []
        self._students: list[StudentSession] = []

    def serve(
        self,
        listener: TeacherListener | None,
        *,
        until_client_leaves: bool,
        on_joined: Callable[[], object] = lambda: None,
    ) -> None:
        """Answer requests for ever, or until students have connected and all have left.

        Args:
            listener: None on other ranks than the replica's main one.
            on_joined: Called on the main rank when a student has connected.

        Collectives: those of ``ReplicaRanks.broadcast`` every few seconds and for each request, and
        for each request those of the teacher and of ``FormedTargets``.

        Raises:
            DistributedError: No student connected in time.
        """
        assert (listener is not None) == self._ranks.is_main
        if listener is None:
            self._serve_other()
            return
        listener.open(self)
        try:
            self._serve_main(until_client_leaves, on_joined)
        except BaseException as error:
            for session in self._sessions:
                session.fail(error)
            raise
        finally:
            for session in self._sessions:
                session.end()
            listener.close()
        self._ranks.broadcast(_END)

    def hello(self) -> Frame:
        """The server's greeting."""
        return Frame(HELLO, self._hello.values(), {})

    def begin(self, peer: str) -> StudentSession:
        """Begin the session of a new student, whose address is in gRPC's notation."""
        session = StudentSession(
            peer,
            form=self._formed.form,
            device=self._ranks.device,
            requests=self._requests,
            limits=self.limits,
            timeout_s=self._timeout_s,
        )
        self._sessions = [*(its for its in self._sessions if its.is_there), session]
        return session

    def _serve_main(self, until_client_leaves: bool, on_joined: Callable[[], object]) -> None:
        has_come, started = False, time.monotonic()
        while True:
            event = self._requests.next(_IDLE_S)
            if event is None:
                self._ranks.broadcast(b"")
                self._on_idle()
                waited_s = time.monotonic() - started
                if until_client_leaves and not has_come and waited_s > self._timeout_s:
                    raise DistributedError(
                        f"no student came to the teacher {self._hello.teacher}",
                        got=f"{waited_s:.0f} s without one",
                        fix="look at the student's log",
                    )
                continue
            if event.kind == "joined":
                has_come = True
                on_joined()
                self._students.append(event.session)
            elif event.kind == "left":
                self._students.remove(event.session)
                if until_client_leaves and not self._students:
                    return
            elif event.session in self._students:
                assert event.frame is not None
                self._answer(event.session, event.frame, is_shared=not until_client_leaves)

    def _answer(self, session: StudentSession, frame: Frame, *, is_shared: bool) -> None:
        """Answer a frame, on the main rank.

        Args:
            is_shared: Whether an error of the teacher ends this session alone. The ranks of a
                replica cannot go on behind one, nor can a device or a process without memory.
        """
        self._on_idle()
        try:
            request = self._parse_request(frame)
        except DistributedError as error:
            # The error concerns this student alone.
            session.fail(error)
            return
        if request is not None and not request.rows:
            session.answer(request.number, [])
            return
        self._ranks.broadcast(to_bytes(frame))
        if request is None:
            assert self._head is not None
            head = self._head()
            assert head is not None
            session.say(Frame(HEAD, {}, {"head": head.contiguous()}))
            return
        try:
            payloads = self._payloads(request.rows)
        except Exception as error:
            if not is_shared or self._ranks.group is not None or _is_fatal(error):
                raise
            sys.stderr.write(f"the teacher {self._hello.teacher} failed for one request\n")
            traceback.print_exc()
            session.fail(error)
            return
        session.answer(request.number, payloads)

    def _serve_other(self) -> None:
        """Take part in the main rank's requests, on the other ranks."""
        while (content := self._ranks.broadcast(None)) != _END:
            self._on_idle()
            if not content:
                continue
            request = self._parse_request(from_bytes(content))
            if request is not None:
                self._payloads(request.rows)
            elif self._head is not None:
                self._head()

    def _parse_request(self, frame: Frame) -> Request | None:
        """The request in a frame; None for a request of the head."""
        form = self._formed.form
        if frame.kind == HEAD and self._head is not None:
            return None
        if frame.kind != REQUEST:
            raise DistributedError("a student asked for something unknown", got=frame.kind)
        request = Request.of(frame, form.kind, self.limits)
        request.check(form.vocab_size)
        return request

    def _payloads(self, asked: Sequence[TokenRows]) -> list[torch.Tensor]:
        """uint8 payload of each microbatch on the main rank; empty on the others."""
        device = self._ranks.device
        batches = [
            InputRows(
                its.tokens.to(device), its.position_ids.to(device), its.attention_mask(device), its
            )
            for its in asked
        ]
        payloads = []
        of_batches = zip(batches, asked, self._teacher.targets(batches), strict=False)
        for batch, its, targets in of_batches:
            # A request has labels if the form needs them; any tensor will do otherwise.
            labels = batch.tokens if its.labels is None else its.labels.to(device)
            fields = self._formed(targets, labels)
            if self._ranks.is_main:
                payloads.append(payload_of(fields, self._formed.form))
        return payloads


def _is_fatal(error: Exception) -> bool:
    """Whether the next request would fail as well."""
    fatal = (MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))
    return isinstance(error, fatal) or "CUDA error" in str(error)

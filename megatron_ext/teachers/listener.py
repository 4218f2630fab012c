"""``TeacherListener``: a teacher's Flight server, with its address, TLS and token check."""

from __future__ import annotations

import hmac
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_ext.errors import ConfigError, DistributedError
from megatron_ext.teachers.flight import SCHEMA, Frame, fl, to_bytes, to_chunks
from megatron_ext.teachers.messages import ERROR, HELLO
from megatron_ext.teachers.server_limits import ConnectionSweep, Peer, peer_of
from megatron_ext.teachers.student_session import StudentSession

if TYPE_CHECKING:
    from megatron_ext.teachers.server import TeacherServer

_END_S: Final = 5.0
_START_S: Final = 60.0
"""Longest wait of a student for a server that is bound but not open yet, in seconds."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server's certificate, with the chain behind it, and of its private key."""

    certificate: Path
    key: Path

    def contents(self) -> tuple[bytes, bytes]:
        """The contents of both files.

        Raises:
            ConfigError: A file cannot be read, or the key does not belong to the certificate.
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            return self.certificate.read_bytes(), self.key.read_bytes()
        except OSError as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                "the certificate of a teacher's server cannot be used",
                where=self.certificate,
                got=getattr(error, "reason", None) or error.strerror or str(error),
                expected=f"a certificate in PEM whose private key is in {self.key}",
                fix="look at --tls-cert and --tls-key",
            ) from error


class TeacherListener:
    """A bound address; students that connect wait until ``open``.

    Args:
        address: ``HOST:PORT`` to bind to; port 0 takes a free one.
        token: Token that students must send.
        tls: Certificate and key; None for unencrypted connections.

    Raises:
        ConfigError: The address, or the certificate, cannot be used.
        DistributedError: The address cannot be bound.
    """

    def __init__(self, address: str, token: str, tls: ServerTls | None = None) -> None:
        host, port = split_address(address)
        pair = tls and tls.contents()
        _check_bindable(host, port, address)
        self._desk: TeacherServer | None = None
        self._sweep: ConnectionSweep | None = None
        self._running: dict[StudentSession, Peer] = {}
        self._changing = threading.Lock()
        self._opened = threading.Event()
        where = fl.Location.for_grpc_tls if pair else fl.Location.for_grpc_tcp
        self._server: Any = _FlightServer(
            self,
            where(host, port),
            tls_certificates=[pair] if pair else None,
            middleware={"token": _TokenCheck(token)},
        )
        self.port: int = self._server.port
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def open(self, desk: TeacherServer) -> None:
        """Accept students."""
        self._desk = desk
        most, idle_s = desk.limits.most_strangers, desk.limits.handshake_s
        self._sweep = ConnectionSweep(self.port, self._checked, most=most, idle_s=idle_s)
        self._opened.set()

    def desk(self) -> TeacherServer:
        """The server, which gRPC threads call; waits for ``open``."""
        self._opened.wait(_START_S)
        if self._desk is None:
            raise fl.FlightUnavailableError("the server is not ready")
        return self._desk

    def begin(self, peer: str) -> StudentSession:
        """Begin the session of a student.

        Raises:
            DistributedError: There are too many.
        """
        desk = self.desk()
        with self._changing:
            most = desk.limits.most_students
            if len(self._running) >= most:
                raise DistributedError(
                    "a teacher's server has as many students as it takes",
                    got=len(self._running) + 1,
                    expected=f"{most} at most",
                    fix="start another server, or let its process open more files (ulimit -n)",
                )
            session = desk.begin(peer)
            self._running[session] = peer_of(peer)
        return session

    def end(self, session: StudentSession) -> None:
        """Forget a session that has ended."""
        with self._changing:
            self._running.pop(session, None)

    def _checked(self) -> set[Peer]:
        """The peers of running sessions, each of which has been checked."""
        with self._changing:
            running = dict(self._running)
        for session in running:
            session.check()
        return set(running.values())

    def close(self) -> None:
        """Stop accepting students; idempotent."""
        self._desk = None
        self._opened.set()
        if self._sweep is not None:
            self._sweep.close()
        # ``shutdown`` waits for running calls, one of which may never end.
        thread = threading.Thread(target=self._server.shutdown, daemon=True)
        thread.start()
        thread.join(_END_S)


class _FlightServer(fl.FlightServerBase):  # type: ignore[misc]
    def __init__(self, listener: TeacherListener, location: Any, **options: Any) -> None:
        self._listener = listener
        super().__init__(location, **options)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        if action.type != HELLO:
            raise fl.FlightUnavailableError("no such action")
        return [to_bytes(self._listener.desk().hello())]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(SCHEMA)
        try:
            session = self._listener.begin(context.peer())
        except DistributedError as error:
            for batch, metadata in to_chunks(Frame(ERROR, {"reason": str(error)}, {})):
                writer.write_with_metadata(batch, metadata)
            # A student whose own first words find the stream closed does not read these: it leaves
            # once it has, and one that does not is swept.
            with suppress(fl.FlightError, StopIteration, OSError):
                reader.read_chunk()
            return
        try:
            session.run(reader, writer)
        finally:
            self._listener.end(session)


class _TokenCheck(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        token = "".join(headers.get("authorization", [])).encode()
        if not hmac.compare_digest(token, self._expected):
            raise fl.FlightUnauthenticatedError("another token")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; a host with colons is in brackets.

    Raises:
        ConfigError: The address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            "the address of a teacher's server cannot be used", got=address, expected="HOST:PORT"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_bindable(host: str, port: int, address: str) -> None:
    """Raise the reason why an address cannot be bound, which gRPC does not give."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise DistributedError(
            "a teacher's server cannot listen there",
            where=address,
            got=error.strerror,
            expected="a free port of this machine",
            fix="take another port, or an address of this machine",
        ) from error

"""A teacher's Flight server: its address, its TLS, and the token that a student must have."""

from __future__ import annotations

import hmac
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from megatron_ext.errors import ConfigError, DistributedError
from megatron_ext.teachers.flight import SCHEMA, Frame, fl, to_bytes
from megatron_ext.teachers.student_session import StudentSession

_END_S: Final = 5.0
_START_S: Final = 60.0
"""How long a student waits for a server that is bound and not open yet."""


class Desk(Protocol):
    """What a listener hands students over to; its methods are called by threads of gRPC."""

    def hello(self) -> Frame:
        """What the server says of itself."""

    def begin(self, peer: str) -> StudentSession:
        """A new session.

        Args:
            peer: As gRPC names it.
        """


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server's certificate, with the chain behind it, and of its private key."""

    certificate: Path
    key: Path

    def contents(self) -> tuple[bytes, bytes]:
        """Both files.

        Raises:
            ConfigError: One cannot be read, or they do not belong together.
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            return self.certificate.read_bytes(), self.key.read_bytes()
        except OSError as error:  # that of TLS is one, too
            raise ConfigError(
                "the certificate of a teacher's server cannot be used",
                where=self.certificate,
                got=getattr(error, "reason", None) or error.strerror or str(error),
                expected=f"a certificate in PEM whose private key is in {self.key}",
                fix="look at --tls-cert and --tls-key",
            ) from error


class TeacherListener:
    """A bound address; students that come wait until ``open``.

    Args:
        address: ``HOST:PORT`` to bind to; port 0 takes a free one.
        token: What a student has to know.
        tls: None for connections that are not encrypted.

    Raises:
        ConfigError: The address, or the certificate, cannot be used.
        DistributedError: The address cannot be bound.
    """

    def __init__(self, address: str, token: str, tls: ServerTls | None = None) -> None:
        host, port = split_address(address)
        pair = tls and tls.contents()
        _check_bindable(host, port, address)
        self._desk: Desk | None = None
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

    def open(self, desk: Desk) -> None:
        """Let students in."""
        self._desk = desk
        self._opened.set()

    def desk(self) -> Desk:
        """Where students go; waits for ``open``."""
        self._opened.wait(_START_S)
        if self._desk is None:
            raise fl.FlightUnavailableError("the server is not ready")
        return self._desk

    def close(self) -> None:
        """Take no more; idempotent."""
        self._desk = None
        self._opened.set()
        # It waits for calls that go on, of which one may never end.
        thread = threading.Thread(target=self._server.shutdown, daemon=True)
        thread.start()
        thread.join(_END_S)

    def __enter__(self) -> TeacherListener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _FlightServer(fl.FlightServerBase):  # type: ignore[misc]
    def __init__(self, listener: TeacherListener, location: Any, **options: Any) -> None:
        self._listener = listener
        super().__init__(location, **options)

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        return [to_bytes(self._listener.desk().hello())]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        writer.begin(SCHEMA)
        self._listener.desk().begin(context.peer()).run(reader, writer)


class _TokenCheck(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets nobody in who does not have the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        said = "".join(headers.get("authorization", [])).encode()
        if not hmac.compare_digest(said, self._expected):
            raise fl.FlightUnauthenticatedError("another token")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; a host that has colons is in brackets.

    Raises:
        ConfigError: It is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            "the address of a teacher's server cannot be used", got=address, expected="HOST:PORT"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_bindable(host: str, port: int, address: str) -> None:
    """Tell why an address cannot be bound; gRPC says only that it cannot."""
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

"""``RemoteServer``: address, credentials and TLS of a teacher's server, and its errors."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import ConfigError, DistributedError, MegatronExtError
from megatron_ext.teachers.flight import CLIENT_OPTIONS, fl
from megatron_ext.teachers.listener import split_address

_RETRY_S: Final = 0.2
_SILENT_S: Final = 5.0
"""Seconds until it is said that a server is waited for."""
_FIX: Final = "look at the teacher's own log; a run goes on from its last checkpoint"
_CLOSED: Final = "connection closed without a word"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteServer:
    """The server of one replica of a remote teacher, as a student knows it."""

    name: str
    """Name of the teacher."""

    address: str
    """``HOST:PORT``"""

    token: str = field(repr=False)
    """Token that the server requires."""

    root_certificate: Path | None = None
    """PEM file of the root that signed the server's certificate; None without TLS."""

    timeout_s: float
    """Longest silence of the server, in seconds."""

    why_gone: Callable[[], str | None] = lambda: None
    """Reason of the end of the server's process, if known."""

    def connected(self, deadline: float) -> Any:
        """Connect a ``FlightClient``, after checks of the address and the certificate.

        Args:
            deadline: Time by ``time.monotonic`` until which the server may start to listen.

        Raises:
            ConfigError: Only one side has TLS, or the certificate is another.
            DistributedError: Nothing listens at the address, or it does not answer.
        """
        host, port = split_address(self.address)
        with self._socket(deadline) as plain:
            if self.root_certificate is None:
                where, options = fl.Location.for_grpc_tcp, {}
            else:
                self._check_certificate(plain, self.root_certificate, host)
                where = fl.Location.for_grpc_tls
                options = {"tls_root_certs": self.root_certificate.read_bytes()}
        return fl.FlightClient(where(host, port), generic_options=CLIENT_OPTIONS, **options)

    def options(self, timeout_s: float | None) -> Any:
        """``FlightCallOptions`` with the token, and a time limit of the call or none."""
        headers = [(b"authorization", f"Bearer {self.token}".encode())]
        return fl.FlightCallOptions(timeout=timeout_s, headers=headers)

    def refused(self, error: Exception) -> MegatronExtError:
        """The error of a failed first call."""
        if isinstance(error, fl.FlightUnauthenticatedError):
            return ConfigError(
                f"the server of teacher {self.name} has another token",
                where=self.address,
                got="a token that it refuses",
                expected="the one that it was started with",
                fix="start both sides with the same MEGATRON_EXT_TEACHER_KEY or serving.token_file",
            )
        if self.root_certificate is None and self._has_tls():
            return ConfigError(
                f"the server of teacher {self.name} has TLS",
                where=self.address,
                got="no root certificate",
                expected="the one that its certificate is checked by",
                fix="set serving.root_certificate",
            )
        return self.lost(error)

    def lost(self, error: Exception) -> DistributedError:
        """The error of a connection lost in a call or its stream."""
        if isinstance(error, fl.FlightTimedOutError | TimeoutError):
            return self.silent(self.timeout_s)
        return self.gone(self.reason(error))

    def reason(self, error: Exception) -> str:
        """Reason of the end of a stream: that of the server's process, if known."""
        if isinstance(error, fl.FlightInternalError | fl.FlightServerError):
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if isinstance(error, fl.FlightError | StopIteration | OSError):
            return self.why_gone() or _CLOSED
        return f"{type(error).__name__}: {error}"

    def gone(self, reason: str) -> DistributedError:
        """The error of a server that has left with a message, or ended with an exit status."""
        return DistributedError(
            f"the teacher {self.name} is gone", where=self.address, got=reason, fix=_FIX
        )

    def silent(self, seconds: float) -> DistributedError:
        """The error of a server that sends nothing any more."""
        return DistributedError(
            f"the teacher {self.name} does not answer",
            where=self.address,
            got=f"no sign of life for {seconds:.0f} s",
            expected="one every second, whatever it computes",
            fix=_FIX,
        )

    def _socket(self, deadline: float) -> socket.socket:
        begun, is_told = time.monotonic(), os.environ.get("RANK", "0") != "0"
        while True:
            try:
                return socket.create_connection(split_address(self.address), self.timeout_s)
            except OSError as error:
                if (reason := self.why_gone()) is not None:
                    raise self.gone(reason) from error
                if time.monotonic() > deadline:
                    raise DistributedError(
                        f"the teacher {self.name} does not answer",
                        where=self.address,
                        got=error.strerror or str(error),
                        expected=f"a server that listens within {self.timeout_s:.0f} s",
                        fix="start it with megatron-ext serve-teacher, and check the address",
                    ) from error
                if not is_told and time.monotonic() > begun + _SILENT_S:
                    is_told = True
                    sys.stderr.write(
                        f"waiting for the teacher {self.name} at {self.address} "
                        f"({error.strerror or error}), up to {deadline - begun:.0f} s\n"
                    )
            time.sleep(_RETRY_S)

    def _check_certificate(self, plain: socket.socket, root: Path, host: str) -> None:
        """Perform the TLS handshake before gRPC does, whose errors do not tell the cause."""
        try:
            context = ssl.create_default_context(cafile=root)
        except OSError as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"the root certificate for teacher {self.name} cannot be read",
                where=root,
                got=getattr(error, "reason", None) or error.strerror or str(error),
                expected="a file of certificates in PEM",
                fix="set serving.root_certificate to the server's certificate, or to that of who "
                "signed it",
            ) from error
        context.set_alpn_protocols(["h2"])
        # gRPC accepts certificates that newer versions of Python refuse as not strict.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            context.wrap_socket(plain, server_hostname=host).close()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"the server of teacher {self.name} has another certificate",
                where=self.address,
                got=error.verify_message,
                expected=f"one for {host} that {root} vouches for",
                fix="set serving.root_certificate to the server's certificate, or to that of who "
                "signed it, and address the server by a name in it",
            ) from error
        except ssl.SSLError as error:
            raise ConfigError(
                f"the server of teacher {self.name} has no TLS",
                where=self.address,
                got=error.reason or str(error),
                expected="TLS, since there is a root certificate",
                fix="start it with --tls-cert and --tls-key, or remove serving.root_certificate",
            ) from error
        except OSError as error:
            raise self.lost(error) from error

    def _has_tls(self) -> bool:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with suppress(OSError), self._socket(0) as plain, context.wrap_socket(plain):
            return True
        return False

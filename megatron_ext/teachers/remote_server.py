"""The address of a teacher's server as a student knows it, and what is wrong with it."""

from __future__ import annotations

import socket
import ssl
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
_FIX: Final = "look at the teacher's own log; a run goes on from its last checkpoint"
_CLOSED: Final = "connection closed without a word"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteServer:
    """One replica of a teacher."""

    name: str
    """Of the teacher."""

    address: str
    """``HOST:PORT``"""

    token: str = field(repr=False)
    """That of the server."""

    root_certificate: Path | None = None
    """PEM file that the server's certificate is checked by; None where it has no TLS."""

    timeout_s: float
    """How long no sign of life may come from it."""

    why_gone: Callable[[], str | None] = lambda: None
    """Tells what became of its process, where that is known."""

    def connected(self, deadline: float) -> Any:
        """A ``FlightClient`` of a server that listens and whose certificate is the right one.

        Args:
            deadline: Until when it is waited for, by ``time.monotonic``, where nobody listens yet.

        Raises:
            ConfigError: One side has TLS, or its certificate is another.
            DistributedError: Nobody listens, or who listens does not answer.
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
        """``FlightCallOptions`` with the token.

        Args:
            timeout_s: The deadline of the call.
        """
        headers = [(b"authorization", f"Bearer {self.token}".encode())]
        return fl.FlightCallOptions(timeout=timeout_s, headers=headers)

    def refused(self, error: Exception) -> MegatronExtError:
        """What was wrong when the first call failed."""
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
        """From what a call, or its stream, raised."""
        if isinstance(error, fl.FlightTimedOutError | TimeoutError):
            return self.silent(self.timeout_s)
        return self.gone(self.reason(error))

    def reason(self, error: Exception) -> str:
        """Why a stream has ended: what became of the server's process, if that is known."""
        if isinstance(error, fl.FlightInternalError | fl.FlightServerError):
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if isinstance(error, fl.FlightError | StopIteration | OSError):
            return self.why_gone() or _CLOSED
        return f"{type(error).__name__}: {error}"

    def gone(self, reason: str) -> DistributedError:
        """Its process has ended, or left.

        Args:
            reason: Its last words, or what its process ended with.
        """
        return DistributedError(
            f"the teacher {self.name} is gone", where=self.address, got=reason, fix=_FIX
        )

    def silent(self, seconds: float) -> DistributedError:
        """It says nothing any more."""
        return DistributedError(
            f"the teacher {self.name} does not answer",
            where=self.address,
            got=f"no sign of life for {seconds:.0f} s",
            expected="one every second, whatever it computes",
            fix=_FIX,
        )

    def _socket(self, deadline: float) -> socket.socket:
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
            time.sleep(_RETRY_S)

    def _check_certificate(self, plain: socket.socket, root: Path, host: str) -> None:
        """Do the first half of what gRPC does, which tells all failures by one text."""
        try:
            context = ssl.create_default_context(cafile=root)
        except OSError as error:  # that of TLS is one, too
            raise ConfigError(
                f"the root certificate for teacher {self.name} cannot be read",
                where=root,
                got=getattr(error, "reason", None) or error.strerror or str(error),
                expected="a file of certificates in PEM",
                fix="set serving.root_certificate to the server's certificate, or to that of who "
                "signed it",
            ) from error
        context.set_alpn_protocols(["h2"])
        # gRPC takes certificates that only newer versions of Python refuse.
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

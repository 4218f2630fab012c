"""Where a server can be reached."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from megatron_ext.errors import ConfigError, DistributedError

_POLL_S: Final = 0.2


class TeacherListener:
    """A listening socket; students may come from now on.

    Args:
        address: ``HOST:PORT`` to bind to; port 0 takes a free one.
        authkey: What a student has to know.

    Raises:
        DistributedError: The address cannot be bound.
    """

    def __init__(self, address: str, authkey: bytes) -> None:
        host, port = split_address(address)
        self.authkey = authkey
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise DistributedError(
                "a teacher's server cannot listen there",
                where=address,
                got=error.strerror,
                fix="take another port, or an address of this machine",
            ) from error
        # So that ``accept`` looks again and again whether it is closed.
        self._socket.settimeout(_POLL_S)
        bound = self._socket.getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if ":" in host else f"{bound[0]}:{bound[1]}"
        self._is_closed = False

    @property
    def port(self) -> int:
        """That it listens at."""
        return split_address(self.address)[1]

    def accept_all(self, welcome: Callable[[socket.socket], object]) -> None:
        """Hand every connection over, until ``close``; for a thread of its own."""
        while not self._is_closed:
            try:
                connected, _ = self._socket.accept()
                welcome(connected)
            except TimeoutError:
                continue
            except OSError:
                # Closed, a connection that ended already, or too many of them.
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Take no more; idempotent."""
        self._is_closed = True
        self._socket.close()

    def __enter__(self) -> TeacherListener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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

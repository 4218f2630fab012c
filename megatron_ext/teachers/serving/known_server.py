"""A teacher's server as a student's configuration knows it, and how it is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from typing import Final

from megatron_ext.errors import ConfigError, DistributedError
from megatron_ext.teachers.serving.listener import split_address
from megatron_ext.teachers.serving.wire import Wire

_RETRY_S: Final = 0.2
_FIX: Final = "look at the teacher's own log; a run goes on from its last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownServer:
    """One replica of a teacher."""

    name: str
    """Of the teacher."""

    address: str
    """``HOST:PORT``"""

    timeout_s: float
    """How long no sign of life may come from it."""

    why_gone: Callable[[], str | None]
    """Tells what became of its process, where that is known."""

    def greeted(self, authkey: bytes, deadline: float) -> Wire:
        """A connection over which both have shown that they know the key.

        Args:
            deadline: Until when it is waited for, by ``time.monotonic``, where nobody listens yet.

        Raises:
            ConfigError: The key is another.
            DistributedError: Nobody listens, or who listens does not answer.
        """
        wire = Wire(self._connected(deadline), timeout_s=self.timeout_s)
        try:
            wire.greet(authkey, is_server=False)
        except AuthenticationError as error:
            wire.close()
            raise ConfigError(
                f"the server of teacher {self.name} has another key",
                where=self.address,
                fix="start both sides with the same key",
            ) from error
        except (EOFError, OSError) as error:
            wire.close()
            raise self.lost(error) from error
        return wire

    def lost(self, error: EOFError | OSError) -> DistributedError:
        """From what its connection raised."""
        if isinstance(error, BlockingIOError):
            return self.silent(self.timeout_s)
        return self.gone(self.why_gone() or str(error) or "connection closed without a word")

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

    def _connected(self, deadline: float) -> socket.socket:
        host, port = split_address(self.address)
        while True:
            try:
                return socket.create_connection((host, port), timeout=self.timeout_s)
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

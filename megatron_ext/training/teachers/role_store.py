"""What the student's and the teachers' ranks of one launch tell one another, through its store."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError

from megatron_ext.distributed import process_groups
from megatron_ext.errors import DistributedError
from megatron_ext.training.rank_report import first_line

_POLL_S: Final = 0.2
_LAST_WORDS_S: Final = 3.0
"""How long what became of a process may take to be known behind the end of its connection."""


class Address(NamedTuple):
    """Where one replica of a teacher listens."""

    address: str
    token: str


class RoleStore:
    """The launch's store, for what concerns one teacher; call it behind joining a default group.

    Args:
        teacher: By name.
    """

    def __init__(self, teacher: str) -> None:
        self.teacher = teacher
        store = process_groups.launch_place().store
        self._store = PrefixStore(f"megatron_ext/teachers/{teacher}", store)

    def token(self) -> str:
        """That of all replicas of the teacher: the first one's."""
        found: bytes = self._store.compare_set("token", "", secrets.token_hex(32))
        return found.decode()

    def announce(self, replica: int, address: Address) -> None:
        """Say where a replica listens."""
        self._store.set(f"address/{replica}", json.dumps(address))

    def addresses(self, replicas: int, *, timeout: timedelta) -> list[Address]:
        """Where all replicas listen; waits until they do.

        Raises:
            DistributedError: One has failed, or does not say so in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        return [self._address(replica, deadline) for replica in range(replicas)]

    def note_failure(self, error: BaseException) -> None:
        """Say why a rank of the teacher ends; the first to do so is heard."""
        with suppress(DistError, RuntimeError, OSError):
            self._store.compare_set("failed", "", first_line(error))

    def why_gone(self) -> str | None:
        """What a rank of the teacher said of its end, which may follow the connection's."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while (found := self._get("failed")) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def finish(self) -> None:
        """Say that the student needs the teacher no more."""
        self._store.set("finished", "1")

    def check_finished(self) -> None:
        """Check that the student has not left for another reason.

        Raises:
            DistributedError: It has.
        """
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._get("finished") is None:
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"the student left the teacher {self.teacher} before its run was finished",
                    fix="look at the logs of the student's ranks",
                )
            time.sleep(_POLL_S)

    def _address(self, replica: int, deadline: float) -> Address:
        while (found := self._get(f"address/{replica}")) is None:
            failed = self._get("failed")
            if failed is not None or time.monotonic() > deadline:
                raise DistributedError(
                    f"the teacher {self.teacher} "
                    + ("is gone" if failed is not None else "does not answer"),
                    got=failed or "no address",
                    fix="look at the logs of its ranks",
                )
            time.sleep(_POLL_S)
        values: Sequence[Any] = json.loads(found)
        return Address(*values)

    def _get(self, key: str) -> str | None:
        # A ``get`` of what is not there would wait for it.
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value.decode()

"""A teacher on ranks of its own in the student's launch, and the store through which both meet."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError

from megatron_ext.distributed import process_groups
from megatron_ext.errors import DistributedError
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.identity import check_same_identity, launch_identity
from megatron_ext.training.teachers.serve_teacher import serve_on_rank
from megatron_ext.training.teachers.teacher_process import Address
from megatron_ext.training.watchdog import first_line, is_communication, watched_launch

_POLL_S: Final = 0.2
_LAST_WORDS_S: Final = 3.0
"""Longest wait for the reason of a failure after a connection has ended."""


class RoleStore:
    """The entries of one teacher in the launch's store; needs the default process group.

    Args:
        teacher: Name of the teacher.
    """

    def __init__(self, teacher: str) -> None:
        self.teacher = teacher
        store = process_groups.launch_place().store
        self._store = PrefixStore(f"megatron_ext/teachers/{teacher}", store)

    def token(self) -> str:
        """The token of all replicas of the teacher, made by the first to ask for it."""
        token: bytes = self._store.compare_set("token", "", secrets.token_hex(32))
        return token.decode()

    def announce(self, replica: int, address: Address) -> None:
        """Publish the address of a replica."""
        self._store.set(f"address/{replica}", json.dumps(address))

    def addresses(self, replicas: int, *, timeout: timedelta) -> list[Address]:
        """The addresses of all replicas; waits until they are published.

        Raises:
            DistributedError: A rank has failed, or an address is not published in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        return [self._address(replica, deadline) for replica in range(replicas)]

    def note_failure(self, error: BaseException) -> None:
        """Publish why a rank of the teacher ends; the first reason stays."""
        with suppress(DistError, RuntimeError, OSError):
            self._store.compare_set("failed", "", first_line(error))

    def why_gone(self) -> str | None:
        """Why a rank of the teacher has ended; waits, since the connection may end before."""
        return self._awaited("failed", time.monotonic() + _LAST_WORDS_S)

    def finish(self) -> None:
        """Publish that the student's run is finished."""
        self._store.set("finished", "1")

    def check_finished(self) -> None:
        """Check that the student left because its run is finished.

        Raises:
            DistributedError: It left for another reason.
        """
        if self._awaited("finished", time.monotonic() + _LAST_WORDS_S) is None:
            raise DistributedError(
                f"the student left the teacher {self.teacher} before its run was finished",
                fix="look at the logs of the student's ranks",
            )

    def _address(self, replica: int, deadline: float) -> Address:
        while (entry := self._get(f"address/{replica}")) is None:
            failed = self._get("failed")
            if failed is not None or time.monotonic() > deadline:
                raise DistributedError(
                    f"the teacher {self.teacher} "
                    + ("is gone" if failed is not None else "does not answer"),
                    got=failed or "no address",
                    fix="look at the logs of its ranks",
                )
            time.sleep(_POLL_S)
        values: Sequence[Any] = json.loads(entry)
        return Address(*values)

    def _awaited(self, key: str, deadline: float) -> str | None:
        while (entry := self._get(key)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return entry

    def _get(self, key: str) -> str | None:
        # A ``get`` of a missing key would wait for it.
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value.decode()


def serve_on_own_ranks(teacher: TeacherPlan, tokenizer: MegatronTokenizerText) -> None:
    """Serve a teacher until the student's run is finished; call it on each of its ranks.

    Args:
        tokenizer: The teacher's.

    Raises:
        MegatronExtError: Anything a user can mend. Also the student's end before its run was
            finished, so that no rank of a failed launch reports success.
    """
    with watched_launch(teacher.parallel.distributed_timeout_minutes) as timeout:
        store = RoleStore(teacher.name)

        def listen(replica: int) -> TeacherListener:
            token = store.token()
            listener = TeacherListener(f"{own_host()}:0", token)
            store.announce(replica, Address(listener.address, token))
            return listener

        try:
            identity = launch_identity(teacher, tokenizer)
            check_same_identity(identity)
            serve_on_rank(
                teacher,
                tokenizer,
                listen,
                identity=lambda: identity,
                until_client_leaves=True,
                collective_timeout=timeout,
            )
        except BaseException as error:
            # A lost connection is the consequence of another rank's failure.
            if not is_communication(error):
                store.note_failure(error)
            raise
        store.check_finished()


def own_host() -> str:
    """The address of this machine that other machines of the launch can reach."""
    main = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, target = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends no packet; it only selects the interface.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            host = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host

"""The processes of a launch that are a teacher's own, from their start to the end of the run.

What the student's and the teachers' ranks of one launch tell one another, through its store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError

from megatron_ext.distributed import process_groups
from megatron_ext.errors import DistributedError
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.server import ReplicaRanks
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training import cpu_megatron
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.identity import check_same_identity, launch_identity
from megatron_ext.training.teachers.served_teacher import ServedTeacher
from megatron_ext.training.watchdog import GRACE, Watchdog, first_line, is_communication

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


def serve_on_own_ranks(teacher: TeacherPlan, tokenizer: MegatronTokenizerText) -> None:
    """Be the teacher until the student's run is finished; on each of its ranks.

    Args:
        tokenizer: The teacher's.

    Raises:
        MegatronExtError: Anything a user can mend; or the student's end before its run was
            finished, so that no rank of the launch ends well where one does not.
    """
    if not torch.cuda.is_available():
        cpu_megatron.install()
    timeout = timedelta(minutes=teacher.parallel.distributed_timeout_minutes)
    process_groups.join(timeout + GRACE)
    with Watchdog(timeout):
        store = RoleStore(teacher.name)
        try:
            _serve(teacher, tokenizer, store, timeout)
        except BaseException as error:
            # What a library says of a lost connection is what became of another rank.
            if not is_communication(error):
                store.note_failure(error)
            raise
        store.check_finished()
    process_groups.finalize()


def _serve(
    teacher: TeacherPlan, tokenizer: MegatronTokenizerText, store: RoleStore, timeout: timedelta
) -> None:
    identity = launch_identity(teacher, tokenizer)
    check_same_identity(identity)

    def listen(ranks: ReplicaRanks, replica: int) -> TeacherListener:
        token = store.token()
        listener = TeacherListener(f"{own_host()}:0", token)
        store.announce(replica, Address(listener.address, token))
        return listener

    served = ServedTeacher(
        teacher=teacher.on_own_ranks,
        tokenizer=tokenizer,
        identity=lambda: identity,
        timeout=timeout,
    )
    served.serve(listen, until_client_leaves=True, collective_timeout=timeout + GRACE)


def own_host() -> str:
    """The address of this machine that the others of the launch can reach."""
    main = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        found = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)
        family, _, _, _, target = found[0]
        # No packet is sent: it is only looked up which interface would send it.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            host = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host

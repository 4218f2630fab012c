"""A student's side of a teacher elsewhere: connecting, and dealing microbatches to its replicas."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch

from megatron_ext.teachers.serving.channels.offers import choose
from megatron_ext.teachers.serving.frames import Frame
from megatron_ext.teachers.serving.hello import Hello
from megatron_ext.teachers.serving.known_server import KnownServer
from megatron_ext.teachers.serving.payload import Fields
from megatron_ext.teachers.serving.protocol import ERROR, READY
from megatron_ext.teachers.serving.replica_client import ReplicaClient
from megatron_ext.teachers.serving.wire import Wire
from megatron_ext.teachers.targets.form import TargetForm
from megatron_ext.teachers.token_rows import TokenRows


class TeacherClient:
    """One student replica's connections to one teacher, which has one or several replicas.

    Attributes:
        name: Of the teacher.
        form: Of what it sends.
        waited_s: How long answers were waited for.
    """

    def __init__(self, replicas: Sequence[ReplicaClient], *, name: str, form: TargetForm) -> None:
        self.name = name
        self.form = form
        self.waited_s = 0.0
        self._replicas = list(replicas)
        self._numbers = itertools.count()

    @property
    def channels(self) -> list[str]:
        """How each replica's targets come: ``cuda_ipc``, ``shared_memory`` or ``tcp``."""
        return [replica.channel for replica in self._replicas]

    @property
    def received_bytes(self) -> int:
        """All that has arrived."""
        return sum(replica.received_bytes for replica in self._replicas)

    @property
    def received_tokens(self) -> int:
        """Positions whose targets have arrived."""
        return sum(replica.received_tokens for replica in self._replicas)

    def ask(self, rows: Sequence[TokenRows]) -> int:
        """Ask for the targets of microbatches; the number is for ``answer``.

        Contiguous parts of them go to the replicas, as equal as they can be.

        Raises:
            DistributedError: The teacher is gone.
        """
        number, count = next(self._numbers), len(self._replicas)
        bounds = [len(rows) * index // count for index in range(count + 1)]
        for replica, start, stop in zip(self._replicas, bounds, bounds[1:], strict=False):
            replica.ask(number, rows[start:stop])
        return number

    def answer(self, number: int) -> list[Fields]:
        """Fields [B, T, ...] of each microbatch of a request, on the host; waits for them.

        Raises:
            DistributedError: The teacher is gone, or does not answer.
        """
        started = time.perf_counter()
        try:
            return [fields for replica in self._replicas for fields in replica.take(number)]
        finally:
            self.waited_s += time.perf_counter() - started

    def head(self) -> torch.Tensor:
        """[V, D] the teacher's head, on the host.

        Raises:
            DistributedError: As of ``answer``.
        """
        return self._replicas[0].head()

    def close(self) -> None:
        """Leave."""
        for replica in self._replicas:
            replica.close()


def own_addresses(addresses: Sequence[str], *, client: int, clients: int) -> list[str]:
    """Those of a teacher's replicas that one of the student's replicas asks.

    Args:
        addresses: Of all replicas, one each.
        client: Which of the student's replicas.
        clients: How many there are.
    """
    if len(addresses) >= clients:
        return list(addresses[client::clients])
    return [addresses[client % len(addresses)]]


def connect(
    addresses: Sequence[str],
    authkey: bytes,
    *,
    name: str,
    form: TargetForm,
    identity: Mapping[str, str | int],
    device: torch.device,
    timeout: timedelta,
    why_gone: Callable[[], str | None] = lambda: None,
) -> TeacherClient:
    """Connect to the replicas of a teacher that this student replica asks.

    Args:
        addresses: Theirs, ``HOST:PORT``; see ``own_addresses``.
        authkey: That of the servers.
        name: Of the teacher in this run.
        form: What the run reads of it.
        identity: What its targets depend on; a server with another value is refused.
        device: Where its targets are needed.
        timeout: How long a server may take to listen, and later how long no sign of life may come
            from it. Less than a watchdog's, which would otherwise speak first.
        why_gone: Tells what became of the server's process where that is known, such as its exit
            code; it may wait a moment for it.

    Raises:
        ConfigError: A server has another teacher, or the key is another.
        DistributedError: A server does not answer, or its process has ended.
    """
    timeout_s = timeout.total_seconds()
    deadline = time.monotonic() + timeout_s
    replicas: list[ReplicaClient] = []
    try:
        for address in addresses:
            server = KnownServer(name=name, address=address, timeout_s=timeout_s, why_gone=why_gone)
            wire = server.greeted(authkey, deadline)
            try:
                channel = _agreed(wire, server, form=form, identity=identity, device=device)
            except BaseException:
                wire.close()
                raise
            replicas.append(
                ReplicaClient(wire, server=server, form=form, device=device, channel=channel)
            )
    except BaseException:
        for replica in replicas:
            replica.close()
        raise
    return TeacherClient(replicas, name=name, form=form)


def _agreed(
    wire: Wire,
    server: KnownServer,
    *,
    form: TargetForm,
    identity: Mapping[str, str | int],
    device: torch.device,
) -> str:
    """The channel of a server that has the right teacher."""
    try:
        said = wire.receive()
        if said.kind == ERROR:
            raise server.gone(str(said.values.get("reason")))
        values = said.values
        hello = Hello.of(values, where=server.address)
        hello.check(form=form, identity=identity, name=server.name, where=server.address)
        channel = choose(values["channels"], device)
        wire.send(Frame(READY, {"channel": channel}, {}))
    except (EOFError, OSError) as error:
        raise server.lost(error) from error
    wire.wait_without_limit()
    return channel

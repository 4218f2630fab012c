"""A remote teacher of a run: starting or finding its processes, and connecting to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.errors import DistributedError, MegatronExtError
from megatron_ext.teachers.connection import Connection, connect, own_addresses
from megatron_ext.teachers.remote_server import RemoteServer
from megatron_ext.teachers.remote_teacher import RemoteTeacher
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.first_weights import teacher_vocab_shard
from megatron_ext.training.learning_step import TaughtBy, run_projection
from megatron_ext.training.models import DTYPES
from megatron_ext.training.teachers.identity import (
    launch_identity,
    server_identity,
    weights_on_all,
)
from megatron_ext.training.teachers.own_ranks import RoleStore
from megatron_ext.training.teachers.target_checks import described, served_form
from megatron_ext.training.teachers.teacher_parts import StudentParts, TeacherParts
from megatron_ext.training.teachers.teacher_process import TeacherProcess, server_token
from megatron_ext.training.watchdog import first_line


class _Found(NamedTuple):
    """Where a teacher is, on a rank that asks it."""

    addresses: Sequence[str]
    token: str
    root_certificate: Path | None = None
    why_gone: Callable[[], str | None] = lambda: None
    finish: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


def teacher_elsewhere(name: str, run: StudentParts) -> TeacherParts:
    """Connect to it, from the main rank of each replica.

    Collectives: those of ``teacher_vocab_shard``, ``RemoteTeacher`` and ``run_projection``, and two
    all-gathers of objects.

    Raises:
        MegatronExtError: It is not there, or not the one that is meant; on every rank.
    """
    teacher_plan, groups = run.teacher(name), run.groups
    form = served_form(teacher_plan, run.tokenizer(name))
    shard = teacher_vocab_shard(teacher_plan, run.tokenizer(name), groups)
    identity = _identity(name, run)
    found: _Found | None = None
    replicas: list[Connection] = []
    error: Exception | None = None
    if groups.is_replica_main:
        try:
            found = _FINDERS[run.teacher(name).config.placement](name, run)
            replicas = _connect(found, name, run, form, identity)
        except Exception as failure:
            if found is not None:
                found.end()
            error = _named(failure, name)
    _raise_everywhere(error)
    processes = found or _Found((), "")
    remote = RemoteTeacher(
        replicas,
        form=form,
        shard=shard,
        groups=groups,
        last_stage=parallel_state.get_tensor_and_context_parallel_group(),
        dtype=DTYPES[teacher_plan.training.precision],
        prefetch=run.teacher(name).config.serving.prefetch,
        finish=processes.finish,
        end=processes.end,
    )
    if groups.is_main:
        sys.stdout.write(described(name, run.teacher(name).config.placement, form) + "\n")
        sys.stdout.flush()
    projection = run_projection(teacher_plan, run.inputs, run.plan.run_dir, groups)
    return TeacherParts(TaughtBy(teacher_plan, None, shard, projection, None), teacher=remote)


def _connect(
    found: _Found,
    name: str,
    run: StudentParts,
    form: TargetForm,
    identity: Mapping[str, str | int],
) -> list[Connection]:
    groups = run.groups
    servers = [
        RemoteServer(
            name=name,
            address=address,
            token=found.token,
            root_certificate=found.root_certificate,
            timeout_s=_patience(run).total_seconds(),
            why_gone=found.why_gone,
        )
        for address in own_addresses(found.addresses, client=groups.dp_rank, clients=groups.dp_size)
    ]
    return connect(servers, form=form, identity=identity, device=groups.device)


def _on_own_ranks(name: str, run: StudentParts) -> _Found:
    serving, store = run.teacher(name).config.serving, RoleStore(name)
    assert serving.ranks is not None, "checked with the configuration"
    replicas = serving.ranks // serving.replica_size
    addresses = store.addresses(replicas, timeout=_patience(run))
    return _Found(
        [its.address for its in addresses],
        addresses[0].token,
        why_gone=store.why_gone,
        finish=store.finish if run.groups.is_main else lambda: None,
    )


def _in_process(name: str, run: StudentParts) -> _Found:
    process = TeacherProcess(
        name, run_dir=run.plan.run_dir, values=run.plan.values, rank=dist.get_rank()
    )
    try:
        address = process.address(_patience(run).total_seconds())
    except BaseException:
        process.close()
        raise
    # Every replica has started one for itself.
    addresses = [address.address] * run.groups.dp_size
    return _Found(addresses, address.token, why_gone=process.why_gone, end=process.close)


def _on_server(name: str, run: StudentParts) -> _Found:
    serving = run.teacher(name).config.serving
    root = serving.root_certificate
    return _Found(
        serving.address,
        server_token(serving, serving.address),
        None if root is None else Path(root),
    )


_FINDERS: Final[Mapping[str, Callable[[str, StudentParts], _Found]]] = {
    "own_ranks": _on_own_ranks,
    "process": _in_process,
    "server": _on_server,
}


def _patience(run: StudentParts) -> timedelta:
    """How long a teacher may not answer: less than the watchdog waits, which knows less of it."""
    return 0.9 * timedelta(minutes=run.plan.parallel.distributed_timeout_minutes)


def _identity(name: str, run: StudentParts) -> Mapping[str, str | int]:
    """What a teacher must say of itself.

    Collectives: those of ``weights_on_all`` for a server.
    """
    if run.teacher(name).config.placement != "server":
        return launch_identity(run.teacher(name), run.tokenizer(name))
    weights = weights_on_all(run.teacher(name), run.groups)
    return server_identity(run.teacher(name), run.tokenizer(name), weights)


def _named(error: Exception, name: str) -> MegatronExtError:
    """An error that can be sent to the other ranks."""
    if isinstance(error, MegatronExtError):
        return error
    return DistributedError(f"the teacher {name} cannot be reached", got=first_line(error))


def _raise_everywhere(error: Exception | None) -> None:
    """Raise what went wrong on any rank on all of them. One all-gather of objects."""
    everywhere: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, error)
    for other in everywhere:
        if other is not None:
            raise other

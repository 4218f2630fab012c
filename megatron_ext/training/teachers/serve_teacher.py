"""The server of a teacher, built and loaded on each of its ranks.

``megatron-ext serve-teacher`` calls ``serve_at`` and ``serve_parent``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import ConfigError
from megatron_ext.teachers.formed_targets import whole_head
from megatron_ext.teachers.listener import ServerTls, TeacherListener, split_address
from megatron_ext.teachers.server import ReplicaRanks, TeacherServer
from megatron_ext.teachers.server_limits import ServerLimits
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training import watchdog
from megatron_ext.training.configuration.teachers import is_local
from megatron_ext.training.faults import leave_signals_to_the_student
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.identity import (
    launch_identity,
    server_identity,
    weights_identity,
)
from megatron_ext.training.teachers.live_teacher import (
    LiveTeacher,
    check_gives_hidden,
    formed_targets,
    live_teacher,
)
from megatron_ext.training.teachers.target_checks import described, served_form
from megatron_ext.training.teachers.teacher_process import (
    TOKEN_VARIABLE,
    ParentSocket,
    server_token,
    set_token,
)
from megatron_ext.training.watchdog import watched_launch


def serve_at(
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    address: str,
    *,
    tls: ServerTls | None = None,
) -> None:
    """Serve at an address until interrupted; under torchrun or alone.

    Args:
        tokenizer: The teacher's.
        address: HOST:PORT of the first replica; the others listen at the following ports.
        tls: Certificate and key of the server; None for connections that are not encrypted.

    Raises:
        ConfigError: Other machines can reach the server and there is no token, or no TLS without
            ``serving.plain_connection``.
    """
    host, port = split_address(address)
    serving = teacher.config.serving
    token = set_token(serving) if is_local(address) else server_token(serving, address)
    if tls is None and not (is_local(address) or serving.plain_connection):
        raise ConfigError(
            "a teacher's server that other machines can reach needs TLS",
            where=address,
            got="no certificate",
            expected="--tls-cert and --tls-key",
            fix="pass them, or set serving.plain_connection where the network is trusted",
        )

    with watched_launch(teacher.parallel.distributed_timeout_minutes) as timeout:
        secret = _made_token() if token is None else token

        def listen(replica: int) -> TeacherListener:
            at = port + replica if port else 0
            place = f"[{host}]:{at}" if ":" in host else f"{host}:{at}"
            listener = TeacherListener(place, secret, tls)
            form = served_form(teacher, tokenizer)
            print(
                described(teacher.name, f"replica {replica} at {listener.address}", form),
                flush=True,
            )
            return listener

        serve_on_rank(
            teacher,
            tokenizer,
            listen,
            identity=lambda: server_identity(
                teacher, tokenizer, weights_identity(teacher.checkpoint)
            ),
            until_client_leaves=False,
            collective_timeout=timeout,
        )


def serve_parent(teacher: TeacherPlan, tokenizer: MegatronTokenizerText, descriptor: int) -> None:
    """Serve the student's rank that started this process, until it leaves.

    Args:
        tokenizer: The teacher's.
        descriptor: File descriptor of this process's end of the socket pair.
    """
    parent = ParentSocket(descriptor)

    def listen(replica: int) -> TeacherListener:
        listener = TeacherListener("127.0.0.1:0", parent.token)
        parent.announce(listener.address)
        return listener

    with watched_launch(teacher.parallel.distributed_timeout_minutes) as timeout:
        serve_on_rank(
            teacher,
            tokenizer,
            listen,
            identity=lambda: launch_identity(teacher, tokenizer),
            until_client_leaves=True,
            collective_timeout=timeout,
        )


def _made_token() -> str:
    """A new token, printed by the first rank and the same on all. One broadcast of objects."""
    tokens = [secrets.token_hex(32)]
    dist.broadcast_object_list(tokens, src=0)
    if dist.get_rank() == 0:
        print(f"token, made for this start: {TOKEN_VARIABLE}={tokens[0]}", flush=True)
    return tokens[0]


def serve_on_rank(
    teacher: TeacherPlan,
    tokenizer: MegatronTokenizerText,
    listen: Callable[[int], TeacherListener],
    *,
    identity: Callable[[], Mapping[str, str | int]],
    until_client_leaves: bool,
    collective_timeout: timedelta,
) -> None:
    """Build a teacher and answer students; call it on every process of its world.

    Args:
        teacher: Its plan; the ranks are laid out as its section ``serving`` says.
        tokenizer: The teacher's.
        listen: Makes the listener on the main rank of a replica, given the replica's number.
        identity: Identity of the targets, which may take reading the weights; called on main ranks.
        collective_timeout: Longest wait in a collective.

    Collectives: those that build and load a model, and of ``TeacherServer.serve``.

    Raises:
        MegatronExtError: Anything a user can mend.
    """
    teacher = teacher.on_own_ranks
    groups = process_groups.initialize(teacher.parallel.layout, timeout=collective_timeout)
    watchdog.enter(f"building the teacher {teacher.name}")
    form = served_form(teacher, tokenizer)
    model = live_teacher(teacher, tokenizer, groups)
    if form.kind == "hidden":
        where = f"{teacher.section}.serving.targets"
        check_gives_hidden(model, groups, where=where, why="hidden targets are")
    ranks = _replica_ranks(groups)
    tile_rows = teacher.loss.linear_tile_rows
    serving = f"serving the teacher {teacher.name}"
    server = TeacherServer(
        model.teacher,
        name=teacher.name,
        formed=formed_targets(form, tokenizer, model.shard, groups, tile_rows=tile_rows),
        head=partial(_head, model, ranks) if form.kind == "hidden" else None,
        identity=identity() if ranks.is_main else {},
        ranks=ranks,
        # Longest wait for a student to connect or to read an answer.
        timeout=timedelta(minutes=teacher.parallel.distributed_timeout_minutes),
        limits=ServerLimits(length=teacher.config.model.seq_length),
        on_idle=lambda: watchdog.enter(serving),
    )
    watchdog.enter(serving)
    listener = listen(groups.dp_rank) if ranks.is_main else None
    leave = leave_signals_to_the_student if until_client_leaves else lambda: None
    # On the main rank when a student is there: before, nobody else would end it.
    if not ranks.is_main:
        leave()
    server.serve(listener, until_client_leaves=until_client_leaves, on_joined=leave)


def _head(model: LiveTeacher, ranks: ReplicaRanks) -> torch.Tensor | None:
    if model.head is None:
        return None
    return whole_head(model.head, model.shard, is_kept=ranks.is_main)


def _replica_ranks(groups: ProcessGroups) -> ReplicaRanks:
    """The ranks of this rank's replica; the main one is the first of the last stage."""
    if dist.get_world_size() == groups.dp_size:
        return ReplicaRanks(device=groups.device)
    group = parallel_state.get_model_parallel_group()
    last_stage = sorted(dist.get_process_group_ranks(group))[-dist.get_world_size(groups.tp) :]
    return ReplicaRanks(device=groups.device, group=group, main=last_stage[0])

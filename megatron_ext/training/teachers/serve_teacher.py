"""``megatron-ext serve-teacher``: the server of a teacher, for other launches or one parent."""

from __future__ import annotations

import secrets
import sys

import torch.distributed as dist

from megatron_ext.errors import ConfigError
from megatron_ext.teachers.listener import ServerTls, TeacherListener, split_address
from megatron_ext.teachers.server import ReplicaRanks
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teacher_config import is_local
from megatron_ext.training.teachers.identity import (
    launch_identity,
    server_identity,
    weights_identity,
)
from megatron_ext.training.teachers.served_teacher import serve_on_rank
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

        def listen(ranks: ReplicaRanks, replica: int) -> TeacherListener:
            at = port + replica if port else 0
            place = f"[{host}]:{at}" if ":" in host else f"{host}:{at}"
            listener = TeacherListener(place, secret, tls)
            form = served_form(teacher, tokenizer)
            _say(described(teacher.name, f"replica {replica} at {listener.address}", form))
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

    def listen(ranks: ReplicaRanks, replica: int) -> TeacherListener:
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
        _say(f"token, made for this start: {TOKEN_VARIABLE}={tokens[0]}")
    return tokens[0]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

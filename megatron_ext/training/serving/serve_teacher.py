"""``megatron-ext serve-teacher``: a teacher for students that come, on every rank of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from megatron_ext.distributed import process_groups
from megatron_ext.errors import ConfigError
from megatron_ext.teachers.serving import ReplicaRanks, TeacherListener
from megatron_ext.teachers.serving.listener import split_address
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training import cpu_megatron
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.serving.served_targets import (
    described,
    served_form,
    served_identity,
    with_weights,
)
from megatron_ext.training.serving.served_teacher import ServedTeacher
from megatron_ext.training.serving.teacher_process import ParentSocket
from megatron_ext.training.watchdog import GRACE, Watchdog

KEY_VARIABLE: Final = "MEGATRON_EXT_TEACHER_KEY"
"""Of the environment of a server and of its students: the key that they must have alike."""


_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def server_key(addresses: Sequence[str]) -> bytes:
    """That of the environment; on one machine it may be left out.

    Args:
        addresses: Where the server listens, HOST:PORT.

    Raises:
        ConfigError: It is not set, and other machines can reach the server.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    for address in addresses:
        if not key and split_address(address)[0] not in _LOOPBACK:
            raise ConfigError(
                "a teacher's server that other machines can reach needs a key",
                where=address,
                got=f"no environment variable {KEY_VARIABLE}",
                fix="set it to the same secret where the server and its students start",
            )
    return (key or "megatron-ext").encode()


def serve_at(
    config: DistillConfig, name: str, tokenizer: MegatronTokenizerText, address: str
) -> None:
    """Serve at an address until interrupted; under torchrun or alone.

    Args:
        tokenizer: The teacher's.
        address: HOST:PORT of the first replica; the next ones listen at the ports behind it.
    """
    host, port = split_address(address)
    key = server_key([address])

    def listen(ranks: ReplicaRanks, replica: int) -> TeacherListener:
        at = port + replica if port else 0
        listener = TeacherListener(f"[{host}]:{at}" if ":" in host else f"{host}:{at}", key)
        form = served_form(config, name, tokenizer)
        _say(f"{described(name, f'replica {replica} at {listener.address}', form)}")
        return listener

    def identity() -> Mapping[str, str | int]:
        return with_weights(served_identity(config, name, tokenizer), config, name)

    _serve(config, name, tokenizer, identity, listen, until_client_leaves=False)


def serve_parent(
    config: DistillConfig, name: str, tokenizer: MegatronTokenizerText, descriptor: int
) -> None:
    """Serve the student's rank that started this process, until it leaves.

    Args:
        tokenizer: The teacher's.
        descriptor: Of this process's end of the pair.
    """
    parent = ParentSocket(descriptor)

    def listen(ranks: ReplicaRanks, replica: int) -> TeacherListener:
        listener = TeacherListener("127.0.0.1:0", parent.authkey.encode())
        parent.announce(listener.address)
        return listener

    def identity() -> Mapping[str, str | int]:
        return served_identity(config, name, tokenizer)

    _serve(config, name, tokenizer, identity, listen, until_client_leaves=True)


def _serve(
    config: DistillConfig,
    name: str,
    tokenizer: MegatronTokenizerText,
    identity: Callable[[], Mapping[str, str | int]],
    listen: Callable[[ReplicaRanks, int], TeacherListener],
    *,
    until_client_leaves: bool,
) -> None:
    if not torch.cuda.is_available():
        cpu_megatron.install()
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    process_groups.join(timeout + GRACE)
    with Watchdog(timeout):
        served = ServedTeacher(
            config=config, name=name, tokenizer=tokenizer, identity=identity, timeout=timeout
        )
        served.serve(
            listen, until_client_leaves=until_client_leaves, collective_timeout=timeout + GRACE
        )
    if dist.is_initialized():
        process_groups.finalize()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

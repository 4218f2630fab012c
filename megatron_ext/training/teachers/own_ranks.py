"""The processes of a launch that are a teacher's own, from their start to the end of the run."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch

from megatron_ext.distributed import process_groups
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.server import ReplicaRanks
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training import cpu_megatron
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.identity import check_same_identity, launch_identity
from megatron_ext.training.teachers.role_store import Address, RoleStore
from megatron_ext.training.teachers.served_teacher import ServedTeacher
from megatron_ext.training.watchdog import GRACE, Watchdog, is_communication


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

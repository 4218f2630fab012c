"""A teacher that is a table, and its server in a thread or a process of the test's own."""

import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.connection import Connection
from megatron_ext.teachers.formed_targets import FormedTargets
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.remote_server import RemoteServer
from megatron_ext.teachers.server import ReplicaRanks, TeacherServer
from megatron_ext.teachers.target_form import TargetForm
from tests.fork_server import fork_server

VOCAB, WIDTH = 53, 8
TOKEN = "0123456789abcdef"
IDENTITY = {"teacher checkpoint": "c" * 64, "teacher tokenizer": "t" * 64}
CPU = torch.device("cpu")
POISON = VOCAB - 1
"""A row that begins with this token makes the teacher fail."""

_GENERATOR = torch.Generator().manual_seed(3)
TABLE = torch.randn(VOCAB, WIDTH, generator=_GENERATOR)
HEAD = torch.randn(VOCAB, WIDTH, generator=_GENERATOR)
HIDDEN = TargetForm.of("hidden", precision="fp32", top_k=0, hidden_size=WIDTH, vocab_size=VOCAB)


class TableTeacher:
    """Hidden states by token and position; slow where it is told to be."""

    def __init__(self, delay_s=0.0):
        self.shard = VocabShard(start=0, stop=VOCAB, vocab_size=VOCAB)
        self.delay_s = delay_s
        self.calls = []

    def targets(self, microbatches):
        time.sleep(self.delay_s)
        self.calls.append(len(microbatches))
        return [self._of(batch) for batch in microbatches]

    def _of(self, batch):
        if (batch.tokens[:, 0] == POISON).any():
            raise ArithmeticError("a number that no one\nhas seen")
        return TeacherTargets(
            kind="hidden",
            shard=self.shard,
            hidden=TABLE[batch.tokens] + batch.position_ids[..., None],
            head_weight=HEAD,
        )


def rows_of(seed, shape=(2, 6)):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(POISON, shape, generator=generator)
    return TokenRows(
        tokens=tokens, position_ids=torch.arange(shape[1]).expand(shape), labels=tokens.roll(-1, 1)
    )


def expected(rows):
    return TABLE[rows.tokens] + rows.position_ids[..., None]


def server_of(teacher, form=HIDDEN, identity=IDENTITY, timeout_s=10):
    """On one rank."""
    return TeacherServer(
        teacher,
        name="table",
        formed=FormedTargets(form=form, boundary=torch.arange(VOCAB) % 3 == 0),
        head=(lambda: HEAD) if form.kind == "hidden" else None,
        identity=identity,
        ranks=ReplicaRanks(device=CPU),
        timeout=timedelta(seconds=timeout_s),
    )


@contextmanager
def serving(server, *, until_client_leaves=False, tls=None, on_joined=lambda: None):
    """The address of a server in a thread, which ends when its students have left."""
    options = {"until_client_leaves": until_client_leaves, "on_joined": on_joined}
    listener = TeacherListener("127.0.0.1:0", TOKEN, tls)
    errors = []

    def serve():
        try:
            server.serve(listener, **options)
        except ArithmeticError:
            # What its students are told of it is what the tests look at.
            pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.address
    if until_client_leaves:
        thread.join(10)
        assert not thread.is_alive()
        assert not errors


def connected(address, *, form=HIDDEN, identity=IDENTITY, **server):
    """A student; ``server`` are fields of its ``RemoteServer``."""
    options = {"name": "table", "token": TOKEN, "timeout_s": 10.0} | server
    known = RemoteServer(address=address, **options)
    deadline = time.monotonic() + known.timeout_s
    return Connection(known, form=form, identity=identity, device=CPU, deadline=deadline)


class ServerProcess:
    """The same server in a process, which can be killed and stopped."""

    def __init__(self, folder, *, delay_s=0.0, name="server", is_shared=False):
        context = fork_server()
        self._path = folder / name
        self.process = context.Process(
            target=_serve, args=(self._path, delay_s, is_shared), daemon=True
        )
        self.process.start()

    @property
    def address(self):
        deadline = time.monotonic() + 60
        while not self._path.exists():
            assert time.monotonic() < deadline
            assert self.process.is_alive()
            time.sleep(0.02)
        return self._path.read_text()

    @property
    def pid(self):
        return self.process.pid

    def why_gone(self):
        self.process.join(2)
        code = self.process.exitcode
        return None if code is None else f"exit code {code}"

    def end(self):
        self.process.kill()
        self.process.join()


def _serve(path, delay_s, is_shared):
    torch.set_num_threads(1)
    listener = TeacherListener("127.0.0.1:0", TOKEN)
    partial = path.with_suffix(".partial")
    partial.write_text(listener.address)
    partial.rename(path)
    server_of(TableTeacher(delay_s)).serve(listener, until_client_leaves=not is_shared)
    os._exit(0)

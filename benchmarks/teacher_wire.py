"""How fast a teacher's hidden states come from another process of the machine.

    python -m benchmarks.teacher_wire --output benchmarks/results/teacher_wire.json

Answers of 1 to 64 MiB, 4,096 bytes a token (2,048 wide in bf16), each asked ahead of the one that
is read. The teacher computes nothing: it gives the same tensor again. Memory is kept as in runs on
a CPU. Each number is of a few seconds; of the processor, what both processes took for each GB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import psutil
import torch

from benchmarks.alignment import machine
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers import TokenInputs
from megatron_ext.teachers import channels as offers
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.connection import Connection
from megatron_ext.teachers.formed_targets import FormedTargets
from megatron_ext.teachers.listener import TeacherListener
from megatron_ext.teachers.remote_server import RemoteServer
from megatron_ext.teachers.server import ReplicaRanks, TeacherServer
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.megatron_models import cpu_megatron

WIDTH, VOCAB = 2_048, 100
TOKENS_PER_MIB: Final = (1 << 20) // (2 * WIDTH)
MIB: Final = (1, 4, 16, 64)
SECONDS: Final = 2.0
FORM = TargetForm.of("hidden", precision="bf16", top_k=0, hidden_size=WIDTH, vocab_size=VOCAB)
TOKEN = "benchmark"
TIMEOUT_S: Final = 60.0


class SameTeacher:
    """Gives one tensor, or the first rows of it, for whatever it is asked."""

    def __init__(self) -> None:
        self.hidden = torch.randn(1, MIB[-1] * TOKENS_PER_MIB, WIDTH).bfloat16()
        self.shard = VocabShard(start=0, stop=VOCAB, vocab_size=VOCAB)

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """See ``Teacher``."""
        head = self.hidden[0, :VOCAB]
        return [
            TeacherTargets(
                kind="hidden",
                shard=self.shard,
                hidden=self.hidden[:, : batch.tokens.shape[1]],
                head_weight=head,
            )
            for batch in microbatches
        ]


def serve(there: Pipe, channel: str) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    cpu_megatron.install()
    own = {} if channel == offers.FLIGHT else offers.CHANNELS
    with patch.dict(offers.CHANNELS, own, clear=True):
        listener = TeacherListener("127.0.0.1:0", TOKEN)
        there.send(listener.address)
        TeacherServer(
            SameTeacher(),
            name="same",
            formed=FormedTargets(form=FORM),
            head=None,
            identity={},
            ranks=ReplicaRanks(device=torch.device("cpu")),
            timeout=timedelta(seconds=TIMEOUT_S),
        ).serve(listener, until_client_leaves=True)


def connected(address: str) -> Connection:
    """To the server in the other process."""
    server = RemoteServer(name="same", address=address, token=TOKEN, timeout_s=TIMEOUT_S)
    return Connection(
        server,
        form=FORM,
        identity={},
        device=torch.device("cpu"),
        deadline=time.monotonic() + TIMEOUT_S,
    )


def measure(channel: str) -> Iterator[dict[str, Any]]:
    """Answers of all sizes over one connection."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, channel))
    process.start()
    client = connected(here.recv())
    assert client.channel == channel
    both = psutil.Process(), psutil.Process(process.pid)
    for mib in MIB:
        ids = torch.zeros(1, mib * TOKENS_PER_MIB, dtype=torch.int64)
        rows = [TokenRows(tokens=ids, position_ids=ids)]
        asked = [client.ask(rows), client.ask(rows)]
        client.answer(asked.pop(0))
        started, received = time.perf_counter(), client.received_bytes
        busy = [sum(its.cpu_times()[:2]) for its in both]
        while time.perf_counter() - started < SECONDS:
            asked.append(client.ask(rows))
            client.answer(asked.pop(0))
        seconds = time.perf_counter() - started
        gigabytes = (client.received_bytes - received) / 1e9
        student, teacher = (
            (sum(its.cpu_times()[:2]) - before) / gigabytes
            for its, before in zip(both, busy, strict=True)
        )
        client.answer(asked.pop(0))
        yield {
            "channel": channel,
            "mib": mib,
            "mb_per_s": gigabytes * 1e3 / seconds,
            "student_s_per_gb": student,
            "teacher_s_per_gb": teacher,
        }
    client.close()
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    cpu_megatron.install()
    rows = []
    for channel in (offers.FLIGHT, "shared_memory"):
        for row in measure(channel):
            rows.append(row)
            print(
                f"{channel:>14} {row['mib']:>3} MiB {row['mb_per_s']:>7,.0f} MB/s, processor for a"
                f" GB: student {row['student_s_per_gb']:.2f} s, teacher"
                f" {row['teacher_s_per_gb']:.2f} s",
                flush=True,
            )
    if output is not None:
        content = {"machine": {**machine(), "torch": torch.__version__}, "rows": rows}
        output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How fast a teacher's hidden states come from another process of the machine.

    python -m benchmarks.teacher_wire --output benchmarks/results/teacher_wire.json

5,120 bytes a token (2,560 wide in bf16), a global batch of 4 microbatches of 4 rows of 2,048 tokens
asked ahead of the one that is read. The teacher computes nothing: it gives the same tensor again.
Memory is kept as in runs on a CPU. Each number is of a few seconds; of the processor, what the
student's process took.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks.alignment import machine
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers import TokenInputs
from megatron_ext.teachers.serving import ReplicaRanks, TeacherListener, TeacherServer, connect
from megatron_ext.teachers.serving.channels import offers
from megatron_ext.teachers.targets.form import TargetForm
from megatron_ext.teachers.targets.formed_targets import FormedTargets
from megatron_ext.teachers.token_rows import TokenRows
from megatron_ext.training import cpu_megatron

WIDTH, VOCAB, ROWS, LENGTH, MICROBATCHES = 2_560, 100, 4, 2_048, 4
SECONDS: Final = 4.0
REPEATS: Final = 3
FORM = TargetForm.of("hidden", precision="bf16", top_k=0, hidden_size=WIDTH, vocab_size=VOCAB)
KEY = b"benchmark"
TIMEOUT = timedelta(seconds=60)


class SameTeacher:
    """Gives one tensor for whatever it is asked."""

    def __init__(self) -> None:
        self.hidden = torch.randn(ROWS, LENGTH, WIDTH).bfloat16()
        self.shard = VocabShard(start=0, stop=VOCAB, vocab_size=VOCAB)

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """See ``Teacher``."""
        head = self.hidden[0, :VOCAB]
        return [
            TeacherTargets(kind="hidden", shard=self.shard, hidden=self.hidden, head_weight=head)
            for _ in microbatches
        ]


def serve(there: Connection, channel: str) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    cpu_megatron.install()
    own = {} if channel == offers.TCP else offers.CHANNELS
    with patch.dict(offers.CHANNELS, own, clear=True):
        listener = TeacherListener("127.0.0.1:0", KEY)
        there.send(listener.address)
        TeacherServer(
            SameTeacher(),
            name="same",
            formed=FormedTargets(form=FORM),
            head=None,
            identity={},
            ranks=ReplicaRanks(device=torch.device("cpu")),
            timeout=TIMEOUT,
        ).serve(listener, until_client_leaves=True)


def measure(channel: str) -> Iterator[dict[str, Any]]:
    """Several times over one connection."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, channel))
    process.start()
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    rows = [TokenRows(tokens=ids, position_ids=ids)] * MICROBATCHES
    client = connect(
        [here.recv()],
        KEY,
        name="same",
        form=FORM,
        identity={},
        device=torch.device("cpu"),
        timeout=TIMEOUT,
    )
    assert client.channels == [channel]
    asked = [client.ask(rows), client.ask(rows)]
    client.answer(asked.pop(0))
    for _ in range(REPEATS):
        started, busy, received = time.perf_counter(), time.process_time(), client.received_bytes
        while (seconds := time.perf_counter() - started) < SECONDS:
            asked.append(client.ask(rows))
            client.answer(asked.pop(0))
        rate = (client.received_bytes - received) / seconds
        yield {
            "channel": channel,
            "mb_per_s": rate / 1e6,
            "tokens_per_s": rate / FORM.bytes_per_token,
            "student_processor": (time.process_time() - busy) / seconds,
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
    for channel in (offers.TCP, "shared_memory"):
        for row in measure(channel):
            rows.append(row)
            print(
                f"{channel:>14} {row['mb_per_s']:>7,.0f} MB/s {row['tokens_per_s']:>9,.0f} tokens/s"
                f" {row['student_processor']:>5.2f} of a core",
                flush=True,
            )
    if output is not None:
        content = {"machine": {**machine(), "torch": torch.__version__}, "rows": rows}
        output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What one student takes of a teacher's server is limited, and leaves the rest to the others."""

import resource
import time
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.flight import Frame
from megatron_ext.teachers.messages import READY, REQUEST, Request
from megatron_ext.teachers.server_limits import ServerLimits
from tests.hostile.server_attacks import SCHEMA, connections, exchange, say
from tests.teachers.stand_in_teacher import (
    ServerProcess,
    TableTeacher,
    connected,
    expected,
    rows_of,
    server_of,
    serving,
)


def answered(student, seed: int) -> bool:
    rows = rows_of(seed)
    return torch.equal(student.answer(student.ask([rows]))[0]["hidden"], expected(rows))


def test_students_beyond_the_limit_are_refused_until_one_leaves() -> None:
    server = server_of(TableTeacher())
    server.limits = ServerLimits(students=2)
    with serving(server) as address:
        first, second = connected(address), connected(address)
        with pytest.raises(DistributedError, match="as many students as it takes"):
            connected(address, timeout_s=2.0)
        assert answered(first, 1)
        second.close()
        deadline = time.monotonic() + 10
        third = None
        while third is None and time.monotonic() < deadline:
            try:
                third = connected(address, timeout_s=2.0)
            except DistributedError:
                time.sleep(0.05)
        assert third is not None
        assert answered(third, 2)
        first.close()
        third.close()


def test_answers_that_nobody_reads_are_limited_and_others_are_served() -> None:
    class Counting(TableTeacher):
        def targets(self, microbatches):
            if len(microbatches) > 1:
                unread.append(len(microbatches))
            return super().targets(microbatches)

    unread: list[int] = []
    many = Request(0, [rows_of(seed, (2, 4096)) for seed in range(16)]).to_frame("hidden")
    server = server_of(Counting(), timeout_s=60)
    size = 16 * 2 * 4096 * 8 * 4
    server.limits = ServerLimits(unread_bytes=2 * size)
    with serving(server) as address, exchange(address) as (writer, _):
        writer.begin(SCHEMA)
        say(writer, Frame(READY, {"channel": "flight"}, {}))
        for number in range(32):
            values = {**many.values, "number": number}
            say(writer, Frame(REQUEST, values, many.tensors))
        other = connected(address)
        time.sleep(1.0)
        assert all(answered(other, seed) for seed in range(4))
        # gRPC's own buffers take some answers before any is unread.
        assert 0 < len(unread) < 24
        other.close()


def test_a_server_that_may_open_few_files_keeps_its_students(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, is_shared=True)
    try:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (96, 96))
        student = connected(server.address)
        connections(120, b"PRI * HTTP/2.0\r\n")(server.address)
        assert answered(student, 1)
        student.close()
    finally:
        server.end()

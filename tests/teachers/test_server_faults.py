"""A server that dies or stops ends the wait for it in time, and leaves no memory behind."""

import gc
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers import channels as offers
from tests.fork_server import fork_server
from tests.teachers.stand_in_teacher import (
    ServerProcess,
    TableTeacher,
    connected,
    expected,
    rows_of,
    server_of,
    serving,
)

SLOW_S = 3.0


@pytest.fixture
def server(tmp_path):
    process = ServerProcess(tmp_path)
    yield process
    process.end()


@pytest.fixture
def slow(tmp_path):
    process = ServerProcess(tmp_path, delay_s=SLOW_S)
    yield process
    process.end()


def test_a_server_that_is_killed_is_gone_at_once(slow):
    client = connected(slow.address, timeout_s=60, why_gone=slow.why_gone)
    number = client.ask([rows_of(1)])
    os.kill(slow.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(DistributedError, match="the teacher table is gone; got exit code -9") as e:
        client.answer(number)
    assert time.monotonic() - started < SLOW_S
    assert str(e.value).startswith(slow.address)
    client.close()


def test_a_connection_that_is_closed_without_a_word_says_so(slow):
    client = connected(slow.address, timeout_s=60)
    number = client.ask([rows_of(1)])
    slow.end()
    with pytest.raises(DistributedError, match="got connection closed without a word"):
        client.answer(number)


def test_a_server_that_is_interrupted_says_so():
    class Interrupted(TableTeacher):
        def targets(self, microbatches):
            raise KeyboardInterrupt

    with serving(server_of(Interrupted())) as address:
        client = connected(address, timeout_s=60)
        with pytest.raises(DistributedError, match="got the end of its server by Ctrl-C;"):
            client.answer(client.ask([rows_of(1)]))
        client.close()


def test_a_server_that_computes_for_longer_than_the_time_out_lives_and_one_that_stops_does_not(
    slow,
):
    rows, timeout_s = rows_of(1), SLOW_S - 0.5
    client = connected(slow.address, timeout_s=timeout_s)
    (fields,) = client.answer(client.ask([rows]))
    assert torch.equal(fields["hidden"], expected(rows))
    assert client.waited_s > SLOW_S - 0.2
    number = client.ask([rows])
    os.kill(slow.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(DistributedError, match=r"does not answer; got no sign of life for [23] s"):
        client.answer(number)
    assert timeout_s - 1 < time.monotonic() - started < timeout_s + 2
    client.close()


def test_a_server_that_is_stopped_before_it_greets_is_given_up(server):
    address = server.address
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(DistributedError, match="the teacher table does not answer; got no sign"):
        connected(address, timeout_s=1)


def test_what_was_asked_ahead_is_there_without_waiting(slow):
    rows = rows_of(1)
    client = connected(slow.address)
    number = client.ask([rows])
    time.sleep(SLOW_S + 1)
    (fields,) = client.answer(number)
    assert torch.equal(fields["hidden"], expected(rows))
    # Had it not been asked ahead, it would have taken all of that time.
    assert client.waited_s < SLOW_S
    client.close()
    slow.process.join(10)
    assert slow.process.exitcode == 0


def test_shared_memory_goes_with_a_normal_end(server):
    client = connected(server.address)
    assert_shared(client)
    client.close()
    wait_until_nothing_is_shared()
    server.process.join(10)
    assert server.process.exitcode == 0


def test_shared_memory_goes_with_a_killed_server(server):
    client = connected(server.address)
    assert_shared(client)
    server.end()
    with pytest.raises(DistributedError, match="is gone"):
        client.answer(client.ask([rows_of(1)]))
    wait_until_nothing_is_shared()


def test_shared_memory_goes_with_a_killed_student():
    with serving(server_of(TableTeacher()), until_client_leaves=True) as address:
        context = fork_server()
        here, there = context.Pipe()
        student = context.Process(target=_learn, args=(address, there), daemon=True)
        student.start()
        assert here.recv() == "shared_memory"
        assert segments() > 0
        student.kill()
        student.join()
        wait_until_nothing_is_shared()


def test_a_student_that_reads_nothing_is_given_up():
    class Stopping(TableTeacher):
        def targets(self, microbatches):
            os.kill(student.pid, signal.SIGSTOP)
            return super().targets(microbatches)

    context = fork_server()
    here, there = context.Pipe()
    student = context.Process(target=_ask, args=(there,), daemon=True)
    student.start()
    here.recv()
    # Seconds of a busy machine go by until a process that has started is connected.
    with serving(server_of(Stopping(), timeout_s=4), until_client_leaves=True) as address:
        here.send(address)
        deadline = time.monotonic() + 30
        while not threads_of_students() and time.monotonic() < deadline:
            time.sleep(0.05)
    student.kill()
    student.join()


def assert_shared(client):
    """Ask, so that this process has a segment."""
    before = set(os.listdir("/dev/shm"))
    client.answer(client.ask([rows_of(1)]))
    assert client.channel == "shared_memory"
    assert segments() == 1
    # Semaphores are other programs', which come and go.
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} <= before


def segments():
    """Mappings of shared memory that this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:megatron-ext-teacher")


def wait_until_nothing_is_shared():
    """No mapping and no descriptor; threads need a moment to end."""
    deadline = time.monotonic() + 10
    while segments() or _descriptors():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.05)


def _descriptors():
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("megatron-ext-teacher" in str(link) for link in links)


def threads_of_students():
    return sum(thread.name == "student" for thread in threading.enumerate())


def _ask(there):
    there.send("ready")
    address = there.recv()
    with patch.dict(offers.CHANNELS, clear=True):
        client = connected(address)
    client.answer(client.ask([rows_of(1, (8, 1 << 18))]))


def _learn(address, there):
    client = connected(address)
    client.answer(client.ask([rows_of(1)]))
    there.send(client.channel)
    time.sleep(60)

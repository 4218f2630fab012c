"""A side that does not read keeps nobody waiting for ever, and heartbeats not at all."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from megatron_ext.teachers.serving.frames import Frame
from megatron_ext.teachers.serving.wire import Wire

LARGE = Frame("answer", {}, {"a": torch.zeros(1 << 23, dtype=torch.uint8)})


def test_heartbeats_do_not_wait_for_a_side_that_reads_nothing() -> None:
    here, there = (Wire(its, timeout_s=60) for its in socket.socketpair())
    started = time.monotonic()
    for _ in range(20_000):
        here.beat()
    assert time.monotonic() - started < 30
    # What did arrive are whole heartbeats, behind which another frame follows.
    sender = threading.Thread(target=here.send, args=(Frame("request", {"n": 1}, {}),))
    sender.start()
    assert there.receive() == Frame("request", {"n": 1}, {})
    sender.join()
    here.close()
    there.close()


def test_a_side_that_reads_nothing_is_given_up_in_time() -> None:
    here, there = (Wire(its, timeout_s=0.5) for its in socket.socketpair())
    started = time.monotonic()
    with pytest.raises(BlockingIOError):
        here.send(LARGE)
    assert time.monotonic() - started < 10
    here.close()
    there.close()


def test_who_waits_gets_an_end_when_the_wire_is_closed() -> None:
    here, there = (Wire(its, timeout_s=60) for its in socket.socketpair())
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            here.receive()
        except (EOFError, OSError) as error:
            errors.append(error)

    reader = threading.Thread(target=receive)
    reader.start()
    here.close()
    reader.join(5)
    assert [type(error) for error in errors] == [EOFError]
    with pytest.raises(EOFError):
        there.receive()
    here.close()
    there.close()

"""Shards made by several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final

from megatron_ext.errors import MegatronExtError
from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.shard import Progress

Shard = tuple[int, tuple[InputSlice, ...]]
"""Index of a shard, and what it is made of."""

MakeShard = Callable[[int, tuple[InputSlice, ...], Callable[[Progress], None]], None]

_SECONDS_TO_END: Final = 10.0
_THREAD_VARIABLES = ("RAYON_NUM_THREADS",)
"""How many threads the tokenizer libraries use in one process."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a worker died of."""

    error: MegatronExtError | OSError | None
    trace: str


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection


def make_shards(
    make_maker: Callable[[], MakeShard],
    shards: Sequence[Shard],
    *,
    worker_count: int,
    on_progress: Callable[[Progress], None],
) -> None:
    """Make all ``shards``, each in one of ``worker_count`` new processes.

    Args:
        make_maker: Called once in each process; it is pickled.
        shards: What to make, in the order in which it is begun.
        worker_count: Processes.
        on_progress: Called in this process.

    Raises:
        MegatronExtError: What a worker raised, or that one was killed; the others are ended.
        OSError: A worker could not read or write.
        RuntimeError: A worker failed otherwise; the message is its traceback.
    """
    remaining = iter(shards)
    with _workers(make_maker, min(worker_count, len(shards))) as workers:
        busy = {worker.connection: worker.process for worker in workers}
        for connection in busy:
            _send(connection, next(remaining, None))
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                message = _receive(ready, busy[ready])
                if isinstance(message, Progress):
                    on_progress(message)
                    continue
                shard = next(remaining, None)
                _send(ready, shard)
                if shard is None:
                    del busy[ready]


def _send(connection: Connection, shard: Shard | None) -> None:
    # What ended a worker that has ended shows when its next message is asked for.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(shard)


def _receive(connection: Connection, process: BaseProcess) -> Progress | None:
    """The next message of a worker: progress, or None when a shard is done."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join(_SECONDS_TO_END)
        raise MegatronExtError(
            "a worker process was killed",
            got=f"exit code {process.exitcode}",
            fix="run the command again, with fewer --workers if the memory was full",
        ) from None
    if isinstance(message, _Failure):
        if message.error is not None:
            raise message.error
        raise RuntimeError(f"a worker process failed:\n{message.trace}")
    assert message is None or isinstance(message, Progress)
    return message


@contextmanager
def _workers(make_maker: Callable[[], MakeShard], count: int) -> Iterator[list[_Worker]]:
    """Processes that wait for shards; all of them have ended when the block has."""
    # Spawned, not forked: a copy of a process whose tokenizer has started threads may hang.
    context = multiprocessing.get_context("spawn")
    threads = max(1, usable_cores() // count)
    workers: list[_Worker] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make_maker, threads), daemon=True)
            process.start()
            # Only the worker holds its end now, so that its death ends the connection.
            theirs.close()
            workers.append(_Worker(process, ours))
        yield workers
    finally:
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.process.join(_SECONDS_TO_END)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _work(connection: Connection, make_maker: Callable[[], MakeShard], threads: int) -> None:
    """Make the shards that come through ``connection`` until a None, or its end, comes."""
    # An interrupt reaches all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    # The connection ends where the process that started this one does, however that died.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            make = make_maker()
            while (shard := connection.recv()) is not None:
                index, slices = shard
                make(index, slices, connection.send)
                connection.send(None)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            # A full disk, for one, is the user's to mend: the caller says so in one line.
            own = error if isinstance(error, (MegatronExtError, OSError)) else None
            connection.send(_Failure(own, traceback.format_exc()))


def usable_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

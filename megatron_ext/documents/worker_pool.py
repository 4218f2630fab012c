"""``WorkerPool``: tasks spread over processes, with the death of a process detected."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from megatron_ext.errors import MegatronExtError

Task = TypeVar("Task")
Result = TypeVar("Result")

Work = Callable[[Task, Callable[[Any], None]], Result]
"""Function that does a task and reports progress to the parent through its second argument."""

_SECONDS_TO_END: Final = 10.0
_THREAD_VARIABLES = ("RAYON_NUM_THREADS",)
"""Variables that set the number of threads of the tokenizer libraries."""


class _Done(NamedTuple):
    """The result of a task."""

    result: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    """Error that ended a worker."""

    error: MegatronExtError | OSError | None
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool(Generic[Task, Result]):
    """Processes that do tasks in order.

    Attributes:
        make_work: Factory of the work, called once in each process; pickled for spawned ones.
        worker_count: Number of processes; with one the tasks are done in this process.
        method: Start method. A fork of a process whose tokenizer has started threads may hang; but
            not every work can be pickled, which spawning requires.
    """

    make_work: Callable[[], Work[Task, Result]]
    worker_count: int
    method: Literal["spawn", "fork"] = "spawn"

    def results(
        self, tasks: Sequence[Task], *, on_progress: Callable[[Any], None] = lambda progress: None
    ) -> Generator[Result, None, None]:
        """The result of each task, begun and yielded in the order of the tasks.

        Args:
            tasks: The tasks.
            on_progress: Called in this process with each progress report of the work.

        Raises:
            MegatronExtError: Raised by a worker, or a worker was killed; the others are ended at
                once.
            OSError: A worker could not read or write.
            RuntimeError: A worker failed otherwise; the message is the traceback.
        """
        if min(self.worker_count, len(tasks)) <= 1:
            if tasks:
                work = self.make_work()
                yield from (work(task, on_progress) for task in tasks)
            return
        remaining = iter(enumerate(tasks))
        results: dict[int, Result] = {}
        following = 0
        with self._workers(min(self.worker_count, len(tasks))) as workers:
            busy: dict[Any, int] = {}
            for connection in workers:
                _send_next(connection, remaining, busy)
            while busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    message = _receive(ready, workers[ready])
                    if not isinstance(message, _Done):
                        on_progress(message)
                        continue
                    results[busy.pop(ready)] = message.result
                    _send_next(ready, remaining, busy)
                while following in results:
                    yield results.pop(following)
                    following += 1

    @contextmanager
    def _workers(self, count: int) -> Iterator[dict[Connection, BaseProcess]]:
        """Started workers by the parent's end of the connection; ended when the block is left."""
        context = multiprocessing.get_context(self.method)
        threads = max(1, usable_cores() // count)
        workers: dict[Connection, BaseProcess] = {}
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                # A forked worker inherits the parent's ends as well.
                copied = [ours, *workers]
                process = context.Process(  # type: ignore[attr-defined]
                    target=_work,
                    args=(theirs, self.make_work, threads, copied if self.method == "fork" else []),
                    daemon=True,
                )
                process.start()
                # With the worker alone holding its end, its death closes the connection.
                theirs.close()
                workers[ours] = process
            yield workers
        finally:
            for connection in workers:
                connection.close()
            for process in workers.values():
                process.join(_SECONDS_TO_END)
                if process.is_alive():
                    process.kill()
                    process.join()


def _send_next(
    connection: Connection, remaining: Iterator[tuple[int, Any]], busy: dict[Any, int]
) -> None:
    """Send a worker the next task, or None when there are none left."""
    number, task = next(remaining, (None, None))
    if number is not None:
        busy[connection] = number
    # The cause of a dead worker is reported by the next ``_receive``.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(None if number is None else (task,))


def _receive(connection: Connection, process: BaseProcess) -> Any:
    """The next message of a worker: progress, or the result of its task."""
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
    return message


def _work(
    connection: Connection,
    make_work: Callable[[], Work[Any, Any]],
    threads: int,
    copied: Sequence[Connection],
) -> None:
    """Do the tasks that come through ``connection`` until None or the end of the stream."""
    # An interrupt reaches all processes of a terminal; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in copied:
        other.close()
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    # The connection closes when the parent dies, however it died.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            work = make_work()
            while (message := connection.recv()) is not None:
                connection.send(_Done(work(message[0], connection.send)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            # A full disk, for one, is reported in one line, not as a traceback.
            own = error if isinstance(error, (MegatronExtError, OSError)) else None
            connection.send(_Failure(own, traceback.format_exc()))


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

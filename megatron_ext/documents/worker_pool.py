"""Tasks done by several processes, of which one may die."""

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
"""Does a task; what it passes to its second argument reaches the process that waits."""

_SECONDS_TO_END: Final = 10.0
_THREAD_VARIABLES = ("RAYON_NUM_THREADS",)
"""How many threads the tokenizer libraries use in one process."""


class _Done(NamedTuple):
    """The result of a task."""

    result: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a worker died of."""

    error: MegatronExtError | OSError | None
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool(Generic[Task, Result]):
    """Processes that do tasks.

    Attributes:
        make_work: Called once in each process; it is pickled where these are spawned.
        worker_count: Processes; with one the tasks are done in this process.
        method: How processes come to be. A forked copy of a process whose tokenizer has started
            threads may hang; but not everything can be pickled.
    """

    make_work: Callable[[], Work[Task, Result]]
    worker_count: int
    method: Literal["spawn", "fork"] = "spawn"

    def results(
        self, tasks: Sequence[Task], *, on_progress: Callable[[Any], None] = lambda progress: None
    ) -> Generator[Result, None, None]:
        """The result of each task, in the order of the tasks, which are begun in that order.

        Args:
            tasks: What to do.
            on_progress: Called in this process with what the work reports.

        Raises:
            MegatronExtError: What a worker raised, as soon as it did, or that one was killed; the
                others are ended.
            OSError: A worker could not read or write.
            RuntimeError: A worker failed otherwise; the message is its traceback.
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
                _give_next(connection, remaining, busy)
            while busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    message = _receive(ready, workers[ready])
                    if not isinstance(message, _Done):
                        on_progress(message)
                        continue
                    results[busy.pop(ready)] = message.result
                    _give_next(ready, remaining, busy)
                while following in results:
                    yield results.pop(following)
                    following += 1

    @contextmanager
    def _workers(self, count: int) -> Iterator[dict[Connection, BaseProcess]]:
        """Processes that wait for tasks, by our ends; all have ended when the block has."""
        context = multiprocessing.get_context(self.method)
        threads = max(1, usable_cores() // count)
        workers: dict[Connection, BaseProcess] = {}
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                # A copy of this process has our ends as well.
                copied = [ours, *workers]
                process = context.Process(  # type: ignore[attr-defined]
                    target=_work,
                    args=(theirs, self.make_work, threads, copied if self.method == "fork" else []),
                    daemon=True,
                )
                process.start()
                # Only the worker holds its end now, so that its death ends the connection.
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


def _give_next(
    connection: Connection, remaining: Iterator[tuple[int, Any]], busy: dict[Any, int]
) -> None:
    """Have a worker do the next task, or end where there is none."""
    number, task = next(remaining, (None, None))
    if number is not None:
        busy[connection] = number
    # What ended a worker that has ended shows when its next message is asked for.
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
    """Do the tasks that come through ``connection`` until a None, or its end, comes."""
    # An interrupt reaches all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in copied:
        other.close()
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(threads))
    # The connection ends where the process that started this one does, however that died.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            work = make_work()
            while (message := connection.recv()) is not None:
                connection.send(_Done(work(message[0], connection.send)))
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

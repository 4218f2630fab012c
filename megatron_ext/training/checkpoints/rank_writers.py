"""What the writers of one rank do in a save: in threads of the rank, or of a process beside it."""

from __future__ import annotations

import copyreg
import functools
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import wait as wait_for_any
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any, BinaryIO, Final

from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    TemporalAsyncCaller,
)

from megatron_ext.files import die_with_parent
from megatron_ext.training import watchdog
from megatron_ext.training.megatron_models.megatron_parts import needed

_POLL_S: Final = 0.02


def reduced_frame(frame: FrameSummary) -> tuple[Callable[..., FrameSummary], tuple[Any, ...]]:
    """Reduce a line of a traceback to what can be pickled.

    Python 3.13 keeps the line's code, too. torch sends the errors of a rank's writers to rank 0
    with their tracebacks, 2.8 with that code: the rank then failed in the place of the save,
    and rank 0 waited for it.
    """
    made = functools.partial(FrameSummary, lookup_line=False, line=frame.line)
    return made, (frame.filename, frame.lineno, frame.name)


if hasattr(FrameSummary, "_code"):
    copyreg.pickle(FrameSummary, reduced_frame)


class WriteResults:
    """A queue of one result of a writer, in memory that a forked process shares with its parent.

    megatron-core would start a manager process on every rank for this, which takes seconds and
    outlives a killed run; a pipe would block a writer whose result is larger than the pipe, because
    it is read only when the writer has ended.
    """

    def __init__(self) -> None:
        self._file = _shared_file()

    def put(self, result: Any) -> None:
        """Store the writer's one result."""
        pickle.dump(result, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """The result.

        Raises:
            queue.Empty: The writer ended without one.
        """
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError) as error:
            raise queue.Empty from error

    def clear(self) -> None:
        """Forget what a writer that was killed has stored."""
        self._file.seek(0)
        self._file.truncate()

    def close(self) -> None:
        """Free the memory."""
        self._file.close()


def write_buckets(
    transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: Any
) -> None:
    """Write the buckets of a rank, each in a thread of its own, and store their results.

    In place of megatron-core's ``write_buckets``. That of 0.16 forks a process for each, which
    costs more than a small checkpoint, and waits for ever for one that was killed; those of later
    releases do not tell the watchdog that a write goes on.

    Args:
        transforms: First argument of megatron-core's ``write_bucket``.
        use_msc: Whether paths are those of the multi-storage client.
        rank: Unused, as in megatron-core.
        buckets: ``WriteBucket`` each.
        results: Queue that is given a dictionary of lists by index of the bucket, or an error.
    """

    def write(index: int, bucket: Any) -> Any:
        written: list[tuple[int, Any]] = []
        needed("write_bucket").value(
            transforms,
            index,
            bucket,
            SimpleNamespace(put=written.append),
            SimpleNamespace(get=lambda: None, task_done=lambda: None),
            use_fsync=True,
            **({"use_msc": True} if use_msc else {}),
        )
        ((_, result),) = written
        if isinstance(result, Exception):
            raise result
        return result

    try:
        with ThreadPoolExecutor(max(1, len(buckets))) as pool:
            writers = [pool.submit(write, *numbered) for numbered in enumerate(buckets)]
            while wait(writers, timeout=_POLL_S).not_done:
                watchdog.tick()
            results.put({index: writer.result() for index, writer in enumerate(writers)})
    except Exception as error:  # The queue carries it: no result at all would be waited for.
        results.put(error)


def _in_background(function: Callable[..., None], begun: int, *arguments: Any) -> None:
    os.write(begun, b".")
    _be_a_writer()
    function(*arguments)


_START_S: Final = 10.0
"""Longest time until a writer begins."""

_STARTS: Final = 5
"""Most writers that are started for a save."""


def start_in_background(request: AsyncRequest, results: WriteResults) -> TemporalAsyncCaller:
    """Fork the writer of a request; one that hangs where it was forked is killed and forked anew.

    A lock that another thread holds at that moment is never released in the new process. Python
    3.10 takes one of the interpreter there, in which some writers in a hundred hung.

    Raises:
        OSError: No writer has begun.
    """
    if request.async_fn is None:
        return TemporalAsyncCaller()
    for _ in range(_STARTS):
        watchdog.tick()
        results.clear()
        writer, (says, begun) = TemporalAsyncCaller(), os.pipe()
        with os.fdopen(says, "rb") as told:
            try:
                function = functools.partial(_in_background, request.async_fn, begun)
                writer.schedule_async_call(request._replace(async_fn=function, finalize_fns=[]))
            finally:
                os.close(begun)
            # It says that it has begun, or has died.
            if wait_for_any([told.fileno()], timeout=_START_S):
                return writer
        writer.close(abort=True)
    raise OSError(f"{_STARTS} writers in the background did not begin within {_START_S} s each")


def _be_a_writer() -> None:
    """End with the parent process, and leave an interrupt of the terminal to it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _shared_file() -> BinaryIO:
    """A file without a name, in memory where the system allows it, since a disk may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("checkpoint-results"), "w+b")
    return tempfile.TemporaryFile()


def write_at_once(request: AsyncRequest) -> None:
    """Do the work of a writer process in this process."""
    if request.async_fn is None:
        return
    rank, _, results = request.async_fn_args
    assert request.preload_fn is not None
    request.async_fn(rank, request.preload_fn(), results)

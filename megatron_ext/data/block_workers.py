"""Blocks read by processes that may die: which one did is known, and nothing waits for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from megatron_ext.data.packed_dataset import PackedBlock

_POLL_S: Final = 0.5


class DeadWorkerError(Exception):
    """A worker process has ended; the text says how."""


class BlockWorkers(Iterator[PackedBlock]):
    """The blocks of a ``DataLoader`` with workers, in order.

    torch finds a dead worker only while nothing comes from the others, and not at all where the
    worker died in the middle of handing a block over: then the reader waits for the rest of it for
    ever. So the reading is done in a thread, and this one watches the processes.
    """

    def __init__(self, loader: DataLoader[PackedBlock]) -> None:
        self._blocks: Any = iter(loader)
        _unwatch(self._blocks)

    def __next__(self) -> PackedBlock:
        """The next block.

        Raises:
            DeadWorkerError: A worker has died; ``close`` is all that is left to do.
            Exception: What a worker raised.
        """
        self._check_alive()
        read = _Read(self._blocks)
        while not read.ended(_POLL_S):
            self._check_alive()
        if read.error is not None:
            self._check_alive()
            raise read.error
        assert read.block is not None
        return read.block

    def close(self) -> None:
        """End all workers at once, and with them a thread that still waits for one."""
        for worker in self._blocks._workers:
            worker.kill()
        for worker in self._blocks._workers:
            worker.join(5)
        # The reader's pipe ends when nobody can write to it any more, this process included.
        with suppress(OSError, AttributeError):
            self._blocks._worker_result_queue._writer.close()

    def _check_alive(self) -> None:
        for worker in self._blocks._workers:
            if not worker.is_alive():
                raise DeadWorkerError(_how_it_ended(worker.pid, worker.exitcode))


def _unwatch(blocks: Any) -> None:
    """Have torch raise nothing by itself when a worker ends.

    Its handler of SIGCHLD raises wherever the main thread happens to be, in the middle of an update
    as well, where workers are forked from this process.
    """
    if blocks._worker_pids_set:
        _remove_worker_pids(id(blocks))
        blocks._worker_pids_set = False


class _Read(threading.Thread):
    """One block, read in the background."""

    def __init__(self, blocks: Iterator[PackedBlock]) -> None:
        super().__init__(daemon=True)
        self.block: PackedBlock | None = None
        self.error: BaseException | None = None
        self._blocks = blocks
        self.start()

    def run(self) -> None:
        try:
            self.block = next(self._blocks)
        except BaseException as error:
            self.error = error

    def ended(self, seconds: float) -> bool:
        """Whether it has ended, waiting up to so long."""
        self.join(seconds)
        return not self.is_alive()


def _how_it_ended(pid: int | None, code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"worker {pid} was ended by {signal.Signals(-code).name}"
    return f"worker {pid} ended with exit code {code}"

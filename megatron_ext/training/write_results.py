"""What a writer of megatron-core's checkpoints hands back from the process it was forked into."""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
from typing import Any, BinaryIO


class WriteResults:
    """A queue of one result, in memory that a forked process shares with its parent.

    megatron-core would start a manager process on every rank for this, which takes seconds and
    outlives a killed run; a pipe would block a writer whose result is larger than the pipe, because
    it is read only when the writer has ended.
    """

    def __init__(self) -> None:
        self._file = _shared_file()

    def put(self, result: Any) -> None:
        """Keep a result; a writer has one."""
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

    def close(self) -> None:
        """Give the memory back."""
        self._file.close()


def _shared_file() -> BinaryIO:
    """A file without a name, in memory where the system has that: a disk may be full."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("checkpoint-results"), "w+b")
    return tempfile.TemporaryFile()

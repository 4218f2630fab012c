"""One process at a time, where several may begin the same run."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_WITHOUT_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def begin_lock(path: Path) -> Iterator[None]:
    """Hold the lock ``path``, a file that is there only meanwhile; a killed process lets it go.

    On a file system that has no locks the block runs without.

    Raises:
        OSError: The file cannot be made.
    """
    with suppress(FileExistsError):
        # A file in its place shows below, as the missing folder that it is.
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquired(path)
    try:
        yield
    finally:
        # Removed while it is held: who waits for it sees that it is not the file of that name.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquired(path: Path) -> int:
    """The open lock file, locked by this process and still the one that others find."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            # Removed between the two looks at it.
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise

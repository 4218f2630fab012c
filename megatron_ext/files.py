"""Atomic and locked writing of files by several processes."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_WITHOUT_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step; folders on the way are made."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic within one file system only; opened plainly, so
    # that the file gets the permissions that others in its folder have.
    part = hidden_name(path)
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def hidden_name(path: Path) -> Path:
    """A name beside ``path`` that nothing has yet."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A new folder beside ``final``, which the block renames to it; else it is removed.

    Raises:
        OSError: It cannot be made.
    """
    part = hidden_name(final)
    try:
        part.mkdir(parents=True)
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def flush(*paths: Path) -> None:
    """Have the disk hold files, or the names in folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that is appended to, without a last one that is cut short or under way.

    Lines end with a line feed, which is left out here. A file that is not there has none.

    Raises:
        OSError: It cannot be read.
    """
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


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
    # Not every system has it, and only those who begin a run need it.
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise

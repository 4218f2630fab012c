"""Atomic and locked writing of files by several processes, and the end of child processes."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

_WITHOUT_LOCKS: Final = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)

_PR_SET_PDEATHSIG: Final = 1

_OWNED: Final[dict[Path, int]] = {}
"""Descriptors of the lock files that this process owns."""


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step; folders on the way are made."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only within one file system; opened plainly, so
    # that the file gets default permissions.
    hidden = hidden_name(path)
    try:
        with hidden.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into ``folder`` by the names, relative paths, that they get there.

    Raises:
        OSError: One cannot be read or written.
    """
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: It cannot be read, or is a pipe or a device, of which a read may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        reason = "Is a directory" if path.is_dir() else "Is no regular file"
        raise OSError(errno.EINVAL, reason, str(path))
    return path.read_bytes()


def parse_json(content: str | bytes) -> Any:
    """The value that JSON spells.

    Raises:
        ValueError: It is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value in a regular file of JSON.

    Raises:
        OSError: As ``read_bytes``.
        ValueError: As ``parse_json``.
    """
    return parse_json(read_bytes(path))


def from_home(path: str) -> str:
    """``path``, with a ``~/`` at its beginning as the folder of the user.

    A shell leaves it as it is in ``--flag=~/path``, and YAML in every value.
    """
    return os.path.expanduser(path) if path.startswith("~/") else path


def hidden_name(path: Path) -> Path:
    """An unused hidden name beside ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A new folder beside ``final``; it is removed unless the block renames it to ``final``.

    Raises:
        OSError: The folder cannot be made.
    """
    hidden = hidden_name(final)
    try:
        hidden.mkdir(parents=True)
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def flush(*paths: Path) -> None:
    """Flush files, or the entries of folders, to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def whole_lines(path: Path) -> list[bytes]:
    """The complete lines of a file to which others append, without their line feeds.

    A last line without a line feed is left out. A missing file has no lines.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        return read_bytes(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def append_lines(path: Path, lines: bytes) -> None:
    """Append lines to a file, which may be missing: all of them, or none where the disk is full.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(lines) != len(lines):
            os.truncate(file.fileno(), before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def why_not_writable(folder: Path) -> str | None:
    """Why ``folder``, which may be missing, cannot be made or written to; None where it can."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return f"{existing} is {'read-only' if existing.is_dir() else 'a file'}"


@contextmanager
def begin_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, which exists only meanwhile; a killed process releases it.

    On a file system without locks the block runs unlocked.

    Raises:
        OSError: The lock file cannot be made.
    """
    with suppress(FileExistsError):
        # A file in place of the folder raises below.
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquired(path)
    try:
        yield
    finally:
        # Removed while held: a waiting process sees that its file no longer has this name.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def own(path: Path, *, owner: str) -> str | None:
    """Make this process the owner of a lock file until it ends or calls ``disown``; idempotent.

    A record lock: the system releases it with the process, however that ends, and forked processes
    do not hold it. On a file system without locks every process becomes the owner.

    Args:
        owner: Description of this process, written into the file.

    Returns:
        Description of the process that owns the file; None if it is this one now.

    Raises:
        OSError: The file cannot be made or written.
    """
    import fcntl

    if is_owned(path):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                content = os.read(descriptor, 300).decode("utf-8", "replace")
                os.close(descriptor)
                return content.strip() or "another process"
            if error.errno not in _WITHOUT_LOCKS:
                os.close(descriptor)
                raise
        if _has_name(descriptor, path):
            break
        # Its owner released it between the two calls.
        os.close(descriptor)
    disown(path)
    _OWNED[path.absolute()] = descriptor
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{owner}\n".encode(), 0)
    return None


def is_owned(path: Path) -> bool:
    """Whether this process owns a lock file, and it still has its name."""
    descriptor = _OWNED.get(path.absolute())
    return descriptor is not None and _has_name(descriptor, path)


def disown(path: Path) -> None:
    """Release and remove a lock file that this process owns; otherwise do nothing."""
    descriptor = _OWNED.pop(path.absolute(), None)
    if descriptor is not None:
        if _has_name(descriptor, path):
            path.unlink()
        os.close(descriptor)


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def die_with_parent() -> None:
    """Let the system kill this process when its parent dies, however it dies; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _acquired(path: Path) -> int:
    """Descriptor of the lock file, locked by this process and still under its name."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
            if _has_name(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    # Not available on every system, and needed only where a run begins or ends.
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise

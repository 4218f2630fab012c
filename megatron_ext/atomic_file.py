"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


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
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

"""Folders that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_ext.errors import TokenizerError


def write_folder(
    folder: str | os.PathLike[str],
    contents: Mapping[str, bytes],
    *,
    check: Callable[[Path], object],
    replaceable: Callable[[Path], bool],
) -> None:
    """Make ``folder`` with the files ``contents`` in one step; an empty one is taken over.

    It is written under another name beside its own, flushed and checked, and then renamed: a reader
    sees all of it or nothing, whenever the writer dies. What is then left begins with a dot. A
    reader in the midst of a folder that is replaced finds its files gone, not others in their place
    half written. Where the folder holds the very same files already, nothing is done: several ranks
    may write it.

    Args:
        folder: Its name; folders on the way are made.
        contents: Bytes of each file by its name.
        check: Called with the written folder before it gets its name; what it raises is raised.
        replaceable: Whether a folder that is there already, and is not empty, may be replaced.

    Raises:
        TokenizerError: Something is there that may not be replaced, or the disk refuses.
    """
    final = Path(os.path.realpath(folder))
    if _holds(final, contents):
        return
    _refuse_to_replace(final, replaceable)
    part = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        part.mkdir(parents=True)
        for name, content in contents.items():
            _write(part / name, content)
        _flush(part)
        check(part)
        _publish(part, final, contents, replaceable)
        _flush(final.parent)
    except OSError as error:
        raise TokenizerError(
            "cannot write the folder", got=error.strerror or error, where=final
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _refuse_to_replace(final: Path, replaceable: Callable[[Path], bool]) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise TokenizerError(
            "a file is in the place of the folder", fix="name another folder", where=final
        )
    if any(final.iterdir()) and not replaceable(final):
        raise TokenizerError(
            "the folder exists already and is not empty",
            fix="name another folder, or pass overwrite=True",
            where=final,
        )


def _holds(folder: Path, contents: Mapping[str, bytes]) -> bool:
    """Whether a folder holds these files and nothing besides."""
    try:
        names = os.listdir(folder)
        return sorted(names) == sorted(contents) and all(
            (folder / name).read_bytes() == content for name, content in contents.items()
        )
    except OSError:
        return False


def _publish(
    part: Path,
    final: Path,
    contents: Mapping[str, bytes],
    replaceable: Callable[[Path], bool],
) -> None:
    try:
        # Takes the place of an empty folder, and fails on any other.
        part.rename(final)
    except OSError:
        if _holds(final, contents):
            return
        if not final.is_dir():
            raise
        _refuse_to_replace(final, replaceable)
        old = final.with_name(f"{part.name}.old")
        final.rename(old)
        try:
            part.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old)


def _write(file: Path, content: bytes) -> None:
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _flush(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

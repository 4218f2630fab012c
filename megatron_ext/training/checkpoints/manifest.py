"""The manifest of a checkpoint: size and CRC-32 of every file, taken while files are written.

Of the checksums in the standard library CRC-32 is by far the fastest (5.5 GB/s on a core, SHA-256
1.7), and it finds every flipped bit and every burst of 32 bits. It guards against damage, not
against a person who writes a manifest as well.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.files import write_text
from megatron_ext.huggingface.checkpoint_files import is_checkpoint_folder

MANIFEST_FILE: Final = "manifest.json"
_SUM_SUFFIX: Final = ".crc32"
_BLOCK: Final = 1 << 22
_LARGEST: Final = 1 << 28
"""Size above which a file is no manifest."""
DAMAGE_FIX: Final = (
    "copy the checkpoint again, or write the name of an earlier one into the file latest beside it"
)
_OF_A_LIST: Final = "the manifest that was saved with the checkpoint"

FileSum = tuple[int, int]
"""Size and CRC-32 of a file."""


class SummedFile:
    """A file that is written from its beginning to its end, and its checksum beside it.

    Args:
        file: Open file.
        path: Its path. The checksum is in a hidden file beside it until ``write_manifest``.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._size = 0
        self._checksum = 0
        self.tell, self.flush, self.fileno = file.tell, file.flush, file.fileno

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._file.close()
        if error is None:
            text = json.dumps([self._size, self._checksum])
            _sum_file(self._path).write_text(text, encoding="ascii")

    def write(self, data: Any) -> int:
        """Write the next bytes."""
        written = self._file.write(data)
        self._size += written
        self._checksum = zlib.crc32(data, self._checksum)
        return written


@contextmanager
def summed_writes(module: Any) -> Iterator[None]:
    """Let a module, and processes forked meanwhile, write its files as ``SummedFile``."""
    before = vars(module).get("open")
    opening: Callable[..., Any] = before or open

    def opened(path: str | os.PathLike[str], mode: str = "r", **named: Any) -> Any:
        file = opening(path, mode, **named)
        return SummedFile(file, Path(path)) if mode == "wb" else file

    module.open = opened
    try:
        yield
    finally:
        if before is None:
            del module.open
        else:
            module.open = before


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files below ``folder``, in one step.

    Files of ``SummedFile`` are not read again.

    Raises:
        OSError: A file cannot be read, or the manifest cannot be written.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = {path: _written_sum(path) for path in paths if path.suffix != _SUM_SUFFIX}
    files = {
        path.relative_to(folder).as_posix(): known or _sum(path) for path, known in sums.items()
    }
    for path in paths:
        if path.suffix == _SUM_SUFFIX:
            path.unlink()
    write_text(folder / MANIFEST_FILE, _text(files))


def _text(files: Mapping[str, FileSum]) -> str:
    return json.dumps({"checksum": "crc32", "files": files}, indent=0) + "\n"


class Manifest:
    """The files that a checkpoint was saved with.

    Args:
        folder: One iteration's folder.
        files: Sums by name; None where the checkpoint has no manifest, and all files pass.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileSum] | None) -> None:
        self.folder = folder
        self._files = files

    @classmethod
    def of(cls, folder: Path, *, verify: bool = True) -> Manifest:
        """The manifest of a checkpoint.

        Args:
            verify: Whether files are held to it.

        Raises:
            CheckpointError: It cannot be read.
        """
        path = folder / MANIFEST_FILE
        if not verify or not os.path.lexists(path):
            return cls(folder, None)
        return cls(folder, _files(path))

    def read(self, name: str) -> bytes:
        """A file in memory: what is returned is what was checked.

        Raises:
            CheckpointError: It is missing, or damaged.
        """
        path = self.folder / name
        with _reading(path):
            if not path.is_file():
                raise _missing(path)
            content = path.read_bytes()
        self._check(path, name, (len(content), zlib.crc32(content)))
        return content

    def check(self, *, part: int = 0, parts: int = 1) -> None:
        """Check every file, or one of several equal parts of them.

        Raises:
            CheckpointError: A file is missing, or damaged.
        """
        if self._files is None:
            return
        largest = sorted(self._files, key=lambda name: (-self._sizes(name), name))
        names = largest[part::parts]
        # Sizes first: a file that is cut short or missing is found at once.
        for name in names:
            self._check_size(name)
        if names:
            with ThreadPoolExecutor(min(4, len(names), os.cpu_count() or 1)) as pool:
                list(pool.map(self._check_content, names))

    def _sizes(self, name: str) -> int:
        assert self._files is not None
        return self._files[name][0]

    def _check_size(self, name: str) -> None:
        path = self.folder / name
        with _reading(path):
            if not path.is_file():
                raise _missing(path)
            size = path.stat().st_size
        if size != self._sizes(name):
            raise _damaged(path, f"{size:,} bytes", f"{self._sizes(name):,}")

    def _check_content(self, name: str) -> None:
        path = self.folder / name
        with _reading(path):
            found = _sum(path)
        self._check(path, name, found)

    def _check(self, path: Path, name: str, found: FileSum) -> None:
        if self._files is None:
            return
        known = self._files.get(name)
        if known is None:
            raise _damaged(path, "a file that is not in it", _OF_A_LIST)
        if found[0] != known[0]:
            raise _damaged(path, f"{found[0]:,} bytes", f"{known[0]:,}")
        if found[1] != known[1]:
            raise _damaged(path, f"checksum {found[1]:08x}", f"{known[1]:08x}")


def _files(path: Path) -> dict[str, FileSum]:
    """Sums of a manifest, by name."""
    with _reading(path):
        if not path.is_file() or path.stat().st_size > _LARGEST:
            raise _no_manifest(path)
        content = path.read_bytes()
    try:
        listed = json.loads(content)["files"]
        files = {str(name): (size, checksum) for name, (size, checksum) in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_manifest(path) from error
    are_sums = all(type(number) is int for known in files.values() for number in known)
    # The one text of these files: nothing checks the manifest itself.
    if not are_sums or _text(files).encode() != content or not all(map(is_inside, files)):
        raise _no_manifest(path)
    return files


def is_inside(name: object) -> bool:
    """Whether a name is a path of a file below the folder that it is relative to."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _written_sum(path: Path) -> FileSum | None:
    """Sum of a file by its writer, if there is one for a file of this size."""
    with suppress(OSError, ValueError, TypeError):
        size, checksum = json.loads(_sum_file(path).read_text(encoding="ascii"))
        if size == path.stat().st_size:
            return size, checksum
    return None


def _sum_file(path: Path) -> Path:
    return path.with_name(f".{path.name}{_SUM_SUFFIX}")


def _sum(path: Path) -> FileSum:
    size = checksum = 0
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(_BLOCK))
        while count := file.readinto(block):
            size, checksum = size + count, zlib.crc32(block[:count], checksum)
    return size, checksum


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "a file of the checkpoint cannot be read", where=path, got=str(error), fix=DAMAGE_FIX
        ) from error


def _missing(path: Path) -> CheckpointError:
    if is_checkpoint_folder(path.parent):
        return CheckpointError(
            "this is a HuggingFace folder",
            where=path.parent,
            expected="a run, its checkpoints or one of these",
            fix="use it as it is, or make a checkpoint of it with megatron-ext import-hf",
        )
    return CheckpointError(
        "a file of the checkpoint is missing", where=path, got=f"no {path.name}", fix=DAMAGE_FIX
    )


def _damaged(path: Path, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "a file of the checkpoint is not as it was saved",
        where=path,
        got=got,
        expected=expected,
        fix=DAMAGE_FIX,
    )


def _no_manifest(path: Path) -> CheckpointError:
    return CheckpointError(
        "the checkpoint's list of files cannot be read",
        where=path,
        expected="sizes and checksums by name",
        fix=DAMAGE_FIX,
    )

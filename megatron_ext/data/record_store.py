"""Records by key in files that several processes add to and that outlive a kill at any moment.

Each process that writes has a file of records of its own, and beside it a file with a fixed row for
each (key, offset, length, checksum), which is written after the record. A row that is cut off or a
record that does not have its checksum is as if it were not there.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from megatron_ext.errors import DataError

KEY_BYTES: Final = 16

_ROW: Final = struct.Struct(f"<{KEY_BYTES}sQII")


class _Place(NamedTuple):
    file: str
    offset: int
    length: int
    checksum: int


class RecordStore:
    """Bytes by key. It can be sent to another process, or forked.

    A process keeps about 200 bytes in memory for each record.

    Args:
        folder: Where the files are; made if it is missing.
        max_bytes: Size of all files from which on nothing is added.

    Raises:
        DataError: The folder cannot be made.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                "the cache of alignments cannot be made",
                got=error.strerror,
                fix="set cache_dir to a folder that can be written",
                where=folder,
            ) from error
        self._process = os.getpid()
        self._written: tuple[str, int, int] | None = None
        self._readers: dict[str, int] = {}
        self._places: dict[bytes, _Place] = {}
        self._rows_read: dict[str, int] = {}
        self._bytes = 0

    def get(self, key: bytes) -> bytes | None:
        """The record of ``key``, of whichever process; None where there is none."""
        place = self._places.get(key)
        if place is None:
            return None
        file, offset, length, checksum = place
        try:
            record = os.pread(self._readers.get(file) or self._reader(file), length, offset)
        except OSError:
            return None
        return record if len(record) == length and zlib.crc32(record) == checksum else None

    def refresh(self) -> None:
        """Learn of the records that other processes have added."""
        self._own_process()
        self._bytes = 0
        for rows in sorted(self._folder.glob("*.rows")):
            with suppress(OSError):
                self._read_rows(rows)
                self._bytes += os.stat(rows.with_suffix(".records")).st_size

    def add(self, key: bytes, record: bytes) -> None:
        """Keep a record, unless the files are as large as they may be.

        Raises:
            DataError: It cannot be written.
        """
        self._own_process()
        if self._bytes + len(record) > self._max_bytes:
            return
        try:
            if self._written is None:
                self._written = self._new_files()
            name, records, rows = self._written
            offset = os.lseek(records, 0, os.SEEK_END)
            _write_all(records, record)
            place = _Place(name, offset, len(record), zlib.crc32(record))
            _write_all(rows, _ROW.pack(key, *place[1:]))
        except OSError as error:
            raise DataError(
                "the cache of alignments cannot be written",
                got=error.strerror,
                fix="free space, or lower its size",
                where=self._folder,
            ) from error
        self._places[key] = place
        self._bytes += len(record)

    def _read_rows(self, rows: Path) -> None:
        """Take over the rows of a file that were not there before."""
        done = self._rows_read.get(rows.name, 0)
        with rows.open("rb") as stream:
            stream.seek(done)
            content = stream.read()
        content = content[: len(content) // _ROW.size * _ROW.size]
        name = rows.with_suffix(".records").name
        for key, *place in _ROW.iter_unpack(content):
            self._places[key] = _Place(name, *place)
        self._rows_read[rows.name] = done + len(content)

    def _reader(self, name: str) -> int:
        if name not in self._readers:
            self._readers[name] = os.open(self._folder / name, os.O_RDONLY)
        return self._readers[name]

    def _new_files(self) -> tuple[str, int, int]:
        stem = f"{os.getpid()}-{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        # The records first: rows without them would be of no use.
        records = os.open(self._folder / f"{stem}.records", flags, 0o666)
        return f"{stem}.records", records, os.open(self._folder / f"{stem}.rows", flags, 0o666)

    def _own_process(self) -> None:
        """Begin files of our own in a process that was forked."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._written = None

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RecordStore, max_bytes=self._max_bytes), (self._folder,)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]

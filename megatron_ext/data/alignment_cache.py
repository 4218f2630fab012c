"""Caches of aligned texts, in memory or in files shared by processes, and their record format.

A record is a header of little-endian uint32 (1 for a conversation, Ts, the bytes of a student id,
the bytes of a width, and for each teacher Tt and the bytes of an id), then the student's ids and
widths, then for each teacher its ids and the marks of both sides. A conversation also has the masks
of trained tokens, behind the student's widths and behind each teacher's marks. Fields are padded to
multiples of four bytes, so that joined records are read without copying. With one teacher and
vocabularies above 65,536 that is 6 bytes a student token and 5 a teacher token.

Ts student tokens, Tt teacher tokens, D records, H numbers of a header, F fields.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import __version__
from megatron_ext.data.aligner import AlignedText, Aligner, Content, Ids, TeacherTokens, Trained
from megatron_ext.errors import refused_by_system
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.identity import tokenizer_identity
from megatron_ext.tokenizers.token_bytes import utf8

KEY_BYTES: Final = 16

_ROW: Final = struct.Struct(f"<{KEY_BYTES}sQII")


class _Place(NamedTuple):
    file: str
    offset: int
    length: int
    checksum: int


class RecordStore:
    """Records by key in files that several processes append to; picklable and safe to fork.

    Each writing process has its own file of records, and beside it a file of fixed-size rows (key,
    offset, length, checksum). A row is written after its record, and a truncated row or a record
    with another checksum is ignored, so a kill at any moment loses at most the last record. A
    process keeps about 200 bytes in memory for each record.

    Args:
        folder: Folder of the files; made if it is missing.
        max_bytes: Total size of the files above which nothing is added.

    Raises:
        DataError: The folder cannot be made.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        with refused_by_system(
            "the cache of alignments cannot be made",
            fix="set cache_dir to a folder that can be written",
            where=folder,
        ):
            folder.mkdir(parents=True, exist_ok=True)
        self._process = os.getpid()
        self._mask_field: tuple[str, int, int] | None = None
        self._readers: dict[str, int] = {}
        self._places: dict[bytes, _Place] = {}
        self._rows_read: dict[str, int] = {}
        self._bytes = 0

    def get(self, key: bytes) -> bytes | None:
        """The record of ``key`` from any process; None if there is none."""
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
        """Read the rows that other processes have added."""
        self._detect_fork()
        self._bytes = 0
        for rows in sorted(self._folder.glob("*.rows")):
            with suppress(OSError):
                self._read_rows(rows)
                self._bytes += os.stat(rows.with_suffix(".records")).st_size

    def add(self, key: bytes, record: bytes) -> None:
        """Append a record, unless the files have reached ``max_bytes``.

        Raises:
            DataError: The record cannot be written.
        """
        self._detect_fork()
        if self._bytes + len(record) > self._max_bytes:
            return
        with refused_by_system(
            "the cache of alignments cannot be written",
            fix="free space, or lower its size",
            where=self._folder,
        ):
            if self._mask_field is None:
                self._mask_field = self._new_files()
            name, records, rows = self._mask_field
            offset = os.lseek(records, 0, os.SEEK_END)
            _write_all(records, record)
            place = _Place(name, offset, len(record), zlib.crc32(record))
            _write_all(rows, _ROW.pack(key, *place[1:]))
        self._places[key] = place
        self._bytes += len(record)

    def _read_rows(self, rows: Path) -> None:
        """Index the new rows of a file."""
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
        # The file of records first, so that rows never exist without it.
        records = os.open(self._folder / f"{stem}.records", flags, 0o666)
        return f"{stem}.records", records, os.open(self._folder / f"{stem}.rows", flags, 0o666)

    def _detect_fork(self) -> None:
        """Begin new files in a forked process."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._mask_field = None

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RecordStore, max_bytes=self._max_bytes), (self._folder,)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


_FORMAT: Final = 4
"""Version of the record format; raising it invalidates every cache."""


class Store(Protocol):
    """Storage of records by key; see ``RecordStore``."""

    def get(self, key: bytes) -> bytes | None: ...
    def refresh(self) -> None: ...
    def add(self, key: bytes, record: bytes) -> None: ...


class CachedAligner:
    """Aligner that caches the results of another by content, wherever a text comes from.

    Args:
        aligner: The aligner that computes missing texts.
        store: Records of this combination of tokenizers only.
        teacher_count: Teachers that have another tokenizer than the student.
    """

    def __init__(self, aligner: Aligner, store: Store, *, teacher_count: int) -> None:
        self._aligner = aligner
        self._store = store
        self._teacher_count = teacher_count

    def align(self, contents: Sequence[Content]) -> list[AlignedText]:
        """``Aligner.align``, with texts from the store where present."""
        keys = [_key(content) for content in contents]
        records = {key: self._store.get(key) for key in keys}
        if None in records.values():
            self._store.refresh()
            lacking = [key for key, record in records.items() if record is None]
            records |= {key: self._store.get(key) for key in lacking}
        cached = {key: record for key, record in records.items() if record is not None}
        aligned = dict(
            zip(cached, from_records(list(cached.values()), self._teacher_count), strict=True)
        )
        missing = {
            key: content for key, content in zip(keys, contents, strict=True) if key not in aligned
        }
        for key, text in zip(missing, self._aligner.align(list(missing.values())), strict=True):
            self._store.add(key, to_record(text))
            aligned[key] = text
        return [aligned[key] for key in keys]


def cache_folder(
    cache_dir: str | Path,
    student_tokenizer: MegatronTokenizerText,
    teacher_tokenizers: Sequence[MegatronTokenizerText],
) -> Path:
    """Folder of a combination of tokenizers, named by a hash of all that ids depend on but text."""
    tokenizers = [student_tokenizer, *teacher_tokenizers]
    content = {
        "version": f"{__version__}, {_FORMAT}",
        "tokenizers": [tokenizer_identity(tokenizer) for tokenizer in tokenizers],
    }
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return Path(cache_dir) / name


def _key(content: Content) -> bytes:
    if isinstance(content, str):
        return hashlib.blake2b(utf8(content), digest_size=KEY_BYTES).digest()
    written = json.dumps([content.messages, content.template_variables], default=dict)
    return hashlib.blake2b(written.encode(), digest_size=KEY_BYTES, person=b"conversation").digest()


class MemoryStore:
    """Records by key in the memory of one process; a pickled copy is empty.

    Args:
        max_bytes: Total size, beyond which the least recently used records are evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> bytes | None:
        """The record of ``key``; None if there is none."""
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record

    def refresh(self) -> None:
        """Do nothing: no other process adds records."""

    def add(self, key: bytes, record: bytes) -> None:
        """Add a record, unless it alone exceeds ``max_bytes``."""
        if len(record) > self._max_bytes:
            return
        self._bytes += len(record) - len(self._records.pop(key, b""))
        self._records[key] = record
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._records.popitem(last=False)[1])

    def __reduce__(self) -> tuple[object, ...]:
        return MemoryStore, (self._max_bytes,)


_SMALLEST: Final = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))
_ALIGNMENT: Final = 4


def to_record(text: AlignedText) -> bytes:
    """The record of a whole, uncut text."""
    ids, widths = _narrow(text.student_ids), _narrow(text.student_widths)
    header = [text.is_conversation, len(ids), ids.itemsize, widths.itemsize]
    fields = [ids, widths, _mask_field(text.trained)]
    for teacher in text.teachers:
        teacher_ids = _narrow(teacher.ids)
        header += [len(teacher_ids), teacher_ids.itemsize]
        fields += [teacher_ids, teacher.student_marks, teacher.teacher_marks]
        fields.append(_mask_field(teacher.trained))
    parts = [np.array(header, "<u4").tobytes()]
    for field in fields:
        parts += [field.tobytes(), bytes(-field.nbytes % _ALIGNMENT)]
    return b"".join(parts)


def from_records(records: Sequence[bytes], teacher_count: int) -> list[AlignedText]:
    """The texts of D records, as views of one copy of their bytes."""
    content = b"".join(records)
    views = {kind.itemsize: np.frombuffer(content, kind) for kind in _SMALLEST}
    begins = np.cumsum([0, *map(len, records)])[:-1]
    places = np.arange(4 + 2 * teacher_count)
    numbers = np.frombuffer(content, "<u4")
    headers = numbers[begins[:, None] // _ALIGNMENT + places].astype(np.int64)
    counts, sizes = _fields(headers)
    bytes_taken = -(-counts * sizes // _ALIGNMENT) * _ALIGNMENT
    behind = begins + _ALIGNMENT * len(places) + bytes_taken.cumsum(axis=0)
    firsts = (behind - bytes_taken) // sizes
    columns = (firsts.T.tolist(), (firsts + counts).T.tolist(), sizes.T.tolist())
    return [
        _text([views[size][first:stop] for first, stop, size in zip(*row, strict=True)], is_talk)
        for *row, is_talk in zip(*columns, headers[:, 0].tolist(), strict=True)
    ]


def _fields(headers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths and item sizes [F, D] of all fields in order, from headers [D, H]."""
    is_conversation, count, id_size, width_size, *teachers = headers.T
    one = np.ones_like(count)
    fields = [(count, id_size), (count, width_size), (count * is_conversation, one)]
    for teacher_count, teacher_size in zip(teachers[::2], teachers[1::2], strict=True):
        fields += [(teacher_count, teacher_size), (count, one), (teacher_count, one)]
        fields.append((teacher_count * is_conversation, one))
    counts, sizes = zip(*fields, strict=True)
    return np.stack(counts), np.stack(sizes)


def _text(fields: list[NDArray[Any]], is_conversation: int) -> AlignedText:
    ids, widths, trained, *others = fields
    teachers = []
    for at in range(0, len(others), 4):
        teacher_ids, marks, teacher_marks, mask = others[at : at + 4]
        teachers.append(
            TeacherTokens(teacher_ids, marks, teacher_marks, _mask(mask, is_conversation))
        )
    return AlignedText(ids, widths, tuple(teachers), True, _mask(trained, is_conversation))


def _mask_field(trained: Trained) -> NDArray[Any]:
    return np.zeros(0, np.bool_) if trained is None else trained


def _mask(trained: NDArray[Any], is_conversation: int) -> Trained:
    return trained.view(np.bool_) if is_conversation else None


def _narrow(values: Ids) -> Ids:
    """Non-negative ``values`` in the smallest unsigned integer type that holds them."""
    largest = int(values.max(initial=0))
    return values.astype(next(kind for kind in _SMALLEST if largest <= np.iinfo(kind).max))

"""The cached index of a corpus: the place of every document, found in one pass. D documents.

Indexes are memory-mapped arrays that one process of a machine computes and the others wait for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.documents.documents import CorpusReport, add_place
from megatron_ext.documents.lines import read_lines
from megatron_ext.documents.reader import READ_IN_PLACE
from megatron_ext.documents.record_fields import (
    MOST_RECORD_BYTES,
    BadRecord,
    RecordBlock,
    RecordFields,
)
from megatron_ext.documents.records import cut_into_shards, file_records
from megatron_ext.documents.source_file import SourceFile
from megatron_ext.errors import DataError, refused_by_system, refused_input
from megatron_ext.files import begin_lock, new_folder, read_json

_NOTES: Final = "notes.json"

Arrays = Mapping[str, NDArray[Any]]
Notes = Mapping[str, Any]


@dataclass(frozen=True)
class CachedArrays:
    """A folder of arrays, memory-mapped on first use; pickles as its path."""

    folder: Path

    def __getitem__(self, name: str) -> NDArray[Any]:
        # Asked several times for each document, so nothing is done that can be left.
        try:
            return self._arrays[name]
        except KeyError as error:
            raise DataError(
                "the cache is damaged",
                where=self.folder,
                got=f"no {name}",
                fix="remove this folder",
            ) from error

    @cached_property
    def notes(self) -> dict[str, Any]:
        """Plain values stored with the arrays."""
        with _readable(self.folder):
            notes: dict[str, Any] = dict(read_json(self.folder / _NOTES))
        return notes

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        with _readable(self.folder):
            return {file.stem: np.load(file, mmap_mode="r") for file in self.folder.glob("*.npy")}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.folder,)


def _readable(folder: Path) -> AbstractContextManager[None]:
    return refused_input("the cache is damaged", where=folder, fix="remove this folder")


def cached_arrays(
    folder: Path, key: Mapping[str, Any], build: Callable[[], tuple[Arrays, Notes]]
) -> CachedArrays:
    """Arrays and notes of ``build``, computed once for each ``key``.

    Processes that ask at the same time wait for the first, by a file lock; no collective is called,
    so any subset of ranks may ask. The folder appears atomically.

    Args:
        folder: Parent of the folders of all keys; made if it is missing.
        key: Plain values on which the arrays depend.
        build: Computes the arrays, and plain values to store with them.

    Raises:
        DataError: The folder cannot be written.
    """
    place = folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    if not (place / _NOTES).exists():
        with (
            refused_by_system(
                "the cache of the data set cannot be written",
                fix="name a folder that can: path_to_cache, or cache_dir of a data set of texts",
                where=folder,
            ),
            begin_lock(folder / f"{place.name}.lock"),
        ):
            if not (place / _NOTES).exists():
                _write(place, *build())
    return CachedArrays(place)


def _write(place: Path, arrays: Arrays, notes: Notes) -> None:
    with new_folder(place) as part:
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array)
        (part / _NOTES).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        # On a file system without locks another process may have been faster.
        with suppress(OSError):
            part.rename(place)


_FORMAT: Final = 3
"""Version of the arrays; raising it rebuilds every index."""

_EMPTY: Final = "the text is empty"

_log = logging.getLogger(__name__)


def corpus_index(
    files: Sequence[SourceFile],
    fields: RecordFields,
    *,
    cache_folder: Path,
    strict: bool,
    refuse_bad: bool = False,
) -> CachedArrays:
    """The index of the documents of ``files``, in order.

    Args:
        files: The files.
        fields: The field that holds the text or the conversation.
        cache_folder: Folder of the index.
        strict: Raise at the first row that is empty or bad.
        refuse_bad: Raise at the first bad row.

    Returns:
        ``file`` [D], the number of the file; ``row`` [D], counted from 1 in it; ``start`` [D], the
        byte offset of the line in its file, or of the text in ``texts``; ``size`` [D], UTF-8 bytes;
        ``texts`` [N] uint8, the text of files that are not read in place. The notes hold the
        ``report`` and the ``sha256`` of all documents.

    Raises:
        DataError: A file cannot be read, a row is refused (with file and row), or no row holds a
            text.
        MissingDependencyError: A package that reads this kind of file is not installed.
    """
    key = {
        "kind": "corpus",
        "format": _FORMAT,
        "files": [asdict(file) for file in files],
        "text_key": fields.keys[0],
        **({} if fields.content == "text" else {"content": fields.content}),
        # Not in indices of before, which knew no limit.
        **({} if fields.most_bytes == MOST_RECORD_BYTES else {"most_bytes": fields.most_bytes}),
    }
    _check_kinds(files, fields)

    def build() -> tuple[Arrays, Notes]:
        with tempfile.TemporaryFile(dir=cache_folder) as copy:
            survey = _IndexBuilder(fields, copy, strict=strict, refuse_bad=refuse_bad)
            for number, file in enumerate(files):
                survey.add(number, file)
            notes = {"report": asdict(survey.report), "sha256": survey.hash.hexdigest()}
            return survey.arrays(), notes

    index = cached_arrays(cache_folder, key, build)
    _check_report(
        CorpusReport(**index.notes["report"]), files, fields, strict=strict, refuse_bad=refuse_bad
    )
    return index


def line_index(files: Sequence[SourceFile], *, cache_folder: Path) -> CachedArrays:
    """The index of the R lines of JSON lines files; blank lines do not count.

    Returns:
        ``start`` [R], the byte offset of a line; ``line`` [R], its number in its file, from 1. The
        notes hold ``first_record``, the number of the first record of each file.

    Raises:
        DataError: A file cannot be read.
    """

    def build() -> tuple[Arrays, Notes]:
        starts, lines, first_record = array("q"), array("q"), []
        for file in files:
            first_record.append(len(starts))
            first = 1
            (pieces,) = cut_into_shards([file], 1)
            for block in chain.from_iterable(map(read_lines, pieces)):
                kept = [number for number, line in enumerate(block.lines) if line.strip()]
                starts.extend(block.starts[number] for number in kept)
                lines.extend(first + number for number in kept)
                first += len(block.lines)
        index = {"start": np.array(starts, np.int64), "line": np.array(lines, np.int64)}
        return index, {"first_record": first_record}

    key = {"kind": "lines", "files": [asdict(file) for file in files]}
    return cached_arrays(cache_folder, key, build)


def _check_report(
    report: CorpusReport,
    files: Sequence[SourceFile],
    fields: RecordFields,
    *,
    strict: bool,
    refuse_bad: bool,
) -> None:
    """Apply ``strict`` and ``refuse_bad`` to an index that may have been built without them."""
    if strict and report.places:
        raise DataError(report.places[0], fix="correct the row, or leave strict unset")
    if refuse_bad and report.bad_rows:
        raise DataError(": ".join(report.bad[0]), fix="correct the row")
    if not report.documents:
        raise DataError(
            "the corpus holds no text",
            got=str(report).replace("\n", ", "),
            where=", ".join(file.path for file in files[:3]),
            fix=f"check the files and {fields.flag}",
        )
    is_whole = not report.empty_rows and not report.bad_rows
    _log.log(logging.INFO if is_whole else logging.WARNING, "%s", report)


def _check_kinds(files: Sequence[SourceFile], fields: RecordFields) -> None:
    """Refuse conversations in files that are not read in place: texts alone are copied."""
    for file in files:
        if fields.content == "conversation" and file.kind not in READ_IN_PLACE:
            raise DataError(
                "conversations are read by row, which this file does not allow",
                got=file.kind,
                expected="JSON lines that are not compressed, Parquet or Arrow",
                where=file.path,
            )


class _IndexBuilder:
    """Builder of a corpus index."""

    def __init__(
        self, fields: RecordFields, copy: IO[bytes], *, strict: bool, refuse_bad: bool
    ) -> None:
        self.report = CorpusReport()
        self.hash = hashlib.sha256()
        self._fields = fields
        self._copy = copy
        self._strict, self._refuse_bad = strict, refuse_bad
        self._file, self._row = array("i"), array("q")
        self._start, self._size = array("q"), array("q")

    def add(self, number: int, file: SourceFile) -> None:
        """Add the documents of a file."""
        first = 1
        for block in file_records(file, self._fields):
            self._add_block(number, file, block, first=first)
            first += block.line_count
        self.report.rows += first - 1

    def arrays(self) -> Arrays:
        """The arrays of the index; copied text is memory-mapped."""
        self._copy.flush()
        is_empty = not self._copy.tell()
        texts = np.zeros(0, np.uint8) if is_empty else np.memmap(self._copy, np.uint8, "r")
        return {
            "file": np.array(self._file, np.int32),
            "row": np.array(self._row, np.int64),
            "start": np.array(self._start, np.int64),
            "size": np.array(self._size, np.int64),
            "texts": texts,
        }

    def _add_block(self, number: int, file: SourceFile, block: RecordBlock, *, first: int) -> None:
        """Add a block that begins at row ``first`` of a file."""
        rows = [*zip(block.lines, block.columns[0], strict=True)]
        bad_rows = [(bad.line or first, bad) for bad in block.bad]
        for line, row in sorted([*rows, *bad_rows], key=itemgetter(0)):
            if isinstance(row, BadRecord):
                self._refuse(row, file)
            elif not row:
                self._leave_out(BadRecord(line, _EMPTY), file)
                self.report.empty_rows += 1
            elif file.kind not in READ_IN_PLACE:
                start = self._copy.tell()
                self._copy.write(row.encode())
                self._add_document(number, line, start, row)
            else:
                start = block.starts[line - first] if block.starts else 0
                self._add_document(number, line, start, row)

    def _add_document(
        self, file: int, row: int, start: int, document: str | ConversationRecord
    ) -> None:
        content = _content_bytes(document)
        size = len(content)
        self.hash.update(size.to_bytes(8, "little"))
        self.hash.update(content)
        self._file.append(file)
        self._row.append(row)
        self._start.append(start)
        self._size.append(size)
        self.report.documents += 1
        self.report.bytes += size

    def _refuse(self, bad: BadRecord, file: SourceFile) -> None:
        if self._refuse_bad:
            raise bad.error(file.path)
        self._leave_out(bad, file)
        self.report.bad_rows += bad.rows
        add_place(self.report.bad, [bad.place(file.path), bad.problem])

    def _leave_out(self, bad: BadRecord, file: SourceFile) -> None:
        if self._strict:
            raise bad.error(file.path)
        add_place(self.report.places, f"{bad.place(file.path)}: {bad.problem}")


def _content_bytes(document: str | ConversationRecord) -> bytes:
    """UTF-8 of a text, or of the text of a conversation's messages."""
    if isinstance(document, str):
        return document.encode()
    contents = (message.get("content") for message in document.messages)
    return "\n".join(str(content) for content in contents if content).encode("utf-8", "replace")

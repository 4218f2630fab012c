"""Where every document of a corpus is: one pass over its files, kept. D documents."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

import numpy as np

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.errors import DataError
from megatron_ext.preprocessing.bad_record import BadRecord
from megatron_ext.preprocessing.json_line import parse_lines
from megatron_ext.preprocessing.record_block import RecordBlock, RecordFields
from megatron_ext.preprocessing.records import read_records
from megatron_ext.preprocessing.shard_cut import cut_into_shards
from megatron_ext.preprocessing.source_file import SourceFile
from megatron_ext.training.cross_tokenizer.corpus.report import CorpusReport
from megatron_ext.training.sft.cache import Arrays, CachedArrays, Notes, cached_arrays

_FORMAT: Final = 2
"""Of the arrays; another one makes every index anew."""

READ_IN_PLACE: Final = ("json-lines", "parquet", "arrow")
"""Kinds of files of which a row can be read alone; the text of others is copied into the cache."""

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
    """The documents of ``files`` in order.

    Args:
        files: The files.
        fields: Which field holds the text.
        cache_folder: Where the index is kept.
        strict: Let the first row that is empty or bad end the run.
        refuse_bad: Let the first bad one do so.

    Returns:
        ``file`` [D], the number of the file; ``row`` [D], counted from 1 in it; ``start`` [D], the
        byte where the line begins, or the text in ``texts``; ``size`` [D], UTF-8 bytes of the text;
        ``texts`` [N] uint8, the text of files that are not read in place. Noted are the ``report``
        and the ``sha256`` of all documents.

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
    }
    _check_kinds(files, fields)

    def build() -> tuple[Arrays, Notes]:
        with tempfile.TemporaryFile(dir=cache_folder) as copy:
            survey = _Survey(fields, copy, strict=strict, refuse_bad=refuse_bad)
            for number, file in enumerate(files):
                survey.add(number, file)
            notes = {"report": asdict(survey.report), "sha256": survey.hash.hexdigest()}
            return survey.arrays(), notes

    index = cached_arrays(cache_folder, key, build)
    _judge(
        CorpusReport(**index.notes["report"]), files, fields, strict=strict, refuse_bad=refuse_bad
    )
    return index


def _judge(
    report: CorpusReport,
    files: Sequence[SourceFile],
    fields: RecordFields,
    *,
    strict: bool,
    refuse_bad: bool,
) -> None:
    """Hold an index that was built before to what is asked now."""
    if strict and report.places:
        raise DataError(report.places[0], fix="mend the row, or leave strict unset")
    if refuse_bad and report.bad_rows:
        bad = [place for place in report.places if not place.endswith(_EMPTY)]
        raise DataError(bad[0] if bad else f"{report.bad_rows} bad rows", fix="mend the row")
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
    """Conversations are read again where they are: they are not copied."""
    for file in files:
        if fields.content == "conversation" and file.kind not in READ_IN_PLACE:
            raise DataError(
                "conversations are read by row, which this file does not allow",
                got=file.kind,
                expected="JSON lines that are not compressed, Parquet or Arrow",
                where=file.path,
            )


class _Survey:
    """Reads files and notes where their documents are."""

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
        """Note the documents of a file."""
        for block, starts in self._blocks(file):
            self.report.rows += block.line_count
            for bad in block.bad:
                self._refuse(bad, file)
            for index, (line, text) in enumerate(zip(block.lines, block.columns[0], strict=True)):
                if text:
                    start = self._copied(text) if starts is None else starts[index]
                    self._add_document(number, line, start, text)
                else:
                    self._leave_out(BadRecord(line, _EMPTY), file)
                    self.report.empty_rows += 1

    def arrays(self) -> Arrays:
        """What was noted; the copied text is not read into memory."""
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

    def _blocks(self, file: SourceFile) -> Iterator[tuple[RecordBlock, list[int] | None]]:
        """Blocks of a file, with where each record begins if it is read there again."""
        if file.kind == "json-lines":
            yield from _line_blocks(file, self._fields)
            return
        for piece in cut_into_shards([file], 1)[0]:
            for block in read_records(piece, self._fields):
                in_place = file.kind in READ_IN_PLACE
                yield block, [0] * len(block.lines) if in_place else None

    def _copied(self, text: str) -> int:
        start = self._copy.tell()
        self._copy.write(text.encode())
        return start

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

    def _leave_out(self, bad: BadRecord, file: SourceFile) -> None:
        if self._strict:
            raise bad.error(file.path)
        self.report.add_place(bad.place(file.path), bad.problem)


def _content_bytes(document: str | ConversationRecord) -> bytes:
    """UTF-8 of a text, or of what the messages of a conversation say."""
    if isinstance(document, str):
        return document.encode()
    contents = (message.get("content") for message in document.messages)
    return "\n".join(str(content) for content in contents if content).encode("utf-8", "replace")


def _line_blocks(
    file: SourceFile, fields: RecordFields
) -> Iterator[tuple[RecordBlock, list[int] | None]]:
    """Each line of a file, and where it begins."""
    position = 0
    with _opened(file) as stream:
        for number, line in enumerate(stream, start=1):
            content = line if position else line.removeprefix(b"\xef\xbb\xbf")
            yield parse_lines([content.rstrip(b"\n")], fields, first_line=number), [position]
            position += len(line)


def _opened(file: SourceFile) -> AbstractContextManager[IO[bytes]]:
    try:
        return open(file.path, "rb")
    except OSError as error:
        raise DataError("the input cannot be read", got=error.strerror, where=file.path) from error

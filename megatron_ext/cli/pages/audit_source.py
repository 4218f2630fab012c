"""``AuditSource``: the texts of ``megatron-ext align``, from files or from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from megatron_ext.alignment.audit import AuditDocument
from megatron_ext.cli.pages.token_view import short_paths
from megatron_ext.documents.record_fields import BadRecord, RecordBlock, RecordFields
from megatron_ext.documents.records import (
    check_fields,
    check_first_records,
    cut_into_shards,
    read_records,
)
from megatron_ext.documents.source_file import InputSlice, find_sources
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.preprocessing.report import Progress, ProgressBar

STANDARD_INPUT: Final = "-"
_MOST_LISTED: Final = 100
_DEFAULT_KEYS: Final = ("text",)


@dataclass(slots=True)
class AuditSource:
    """Source of documents to audit, read lazily; counts what it leaves out."""

    files: tuple[str, ...] = ()
    """Files, folders and glob patterns; or ``-`` alone."""
    text: str | None = None
    """A text, in place of files."""
    keys: tuple[str, ...] = ()
    """Fields of a record, each a document of its own; empty for ``text``."""
    most_documents: int | None = None
    is_strict: bool = False
    """Whether a bad record is an error."""
    shows_progress: bool = True
    """Whether to show a progress bar on standard error."""
    bad_records: int = 0
    """Records left out so far."""
    bad: list[dict[str, str]] = field(default_factory=list)
    """Place and problem of the first records left out."""
    skipped_files: tuple[str, ...] = ()
    """Files of unknown kind in the named folders."""

    def check(self) -> None:
        """Check that exactly one source is given, before tokenizers are read.

        Raises:
            ConfigError: Neither files nor a text is given, or both.
        """
        if STANDARD_INPUT in self.files and len(self.files) > 1:
            raise ConfigError("standard input stands alone", got=" ".join(self.files))
        if (self.text is None) == (not self.files):
            raise ConfigError(
                "there is nothing to align"
                if self.text is None
                else "there are files and a text to align",
                expected="files, - for standard input, or --text TEXT",
            )

    def documents(self) -> Iterator[AuditDocument]:
        """The documents in order.

        Raises:
            ConfigError: A file has no fields to read.
            DataError: A file cannot be read, no record can be used, or, with ``is_strict``, one
                record cannot.
        """
        return islice(self._read(), self.most_documents)

    def _read(self) -> Iterator[AuditDocument]:
        if self.text is not None:
            yield AuditDocument(encodable(self.text, "--text"), "--text", is_whole_file=True)
        elif self.files == (STANDARD_INPUT,):
            try:
                text = sys.stdin.read()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"the text is not UTF-8 at byte {error.start}",
                    got=error.reason,
                    where="standard input",
                ) from None
            name = "standard input"
            yield AuditDocument(encodable(text, name), name, is_whole_file=True)
        else:
            yield from self._read_files()

    def _read_files(self) -> Iterator[AuditDocument]:
        sources = find_sources(self.files, fix="check the name")
        self.skipped_files = sources.skipped
        names = short_paths(file.path for file in sources.files)
        fields = RecordFields(self.keys or _DEFAULT_KEYS)
        check_fields(sources.files, fields)
        (pieces,) = cut_into_shards(sources.files, 1)
        check_first_records(pieces, fields)
        with self._bar(sum(file.size for file in sources.files)) as bar:
            for piece in pieces:
                for block in read_records(piece, fields):
                    for record in block.bad:
                        if self.is_strict:
                            raise record.error(piece.path)
                        self._note_bad(record, names[piece.path])
                    yield from _documents(block, piece, names[piece.path])
                    if bar is not None:
                        bar.add(_progress(block))

    def _bar(self, size: int) -> AbstractContextManager[ProgressBar | None]:
        return ProgressBar(total=size, done=0) if self.shows_progress else nullcontext()

    def _note_bad(self, record: BadRecord, name: str) -> None:
        self.bad_records += record.rows
        if len(self.bad) < _MOST_LISTED:
            self.bad.append({"place": record.place(name), "problem": record.problem})


def _documents(block: RecordBlock, piece: InputSlice, name: str) -> Iterator[AuditDocument]:
    is_whole_file = piece.kind in ("text", "text-gzip")
    for line, *values in zip(block.lines, *block.columns, strict=True):
        for value in values:
            yield AuditDocument(value, name, line, is_whole_file)


def _progress(block: RecordBlock) -> Progress:
    texts = [value for column in block.columns for value in column]
    return Progress(
        size=block.size,
        text_bytes=sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
        documents=len(texts),
        bad=sum(record.rows for record in block.bad),
    )


def encodable(text: str, where: str) -> str:
    """``text``.

    Raises:
        DataError: It holds a lone surrogate, which has no bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text is not UTF-8 at character {error.start}", where=where) from None
    return text

"""The records of any kind of file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from megatron_ext.errors import DataError
from megatron_ext.preprocessing.arrow_rows import read_arrow
from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.json_document import read_json_document
from megatron_ext.preprocessing.json_line import read_json_lines
from megatron_ext.preprocessing.line_block import newlines_before
from megatron_ext.preprocessing.parquet_rows import read_parquet, rows_before
from megatron_ext.preprocessing.record_block import RecordBlock, RecordFields
from megatron_ext.preprocessing.source_file import SourceFile, SourceKind
from megatron_ext.preprocessing.text_file import check_text_fields, read_text_file

_READERS: Mapping[SourceKind, Callable[[InputSlice, RecordFields], Iterator[RecordBlock]]] = {
    "json-lines": read_json_lines,
    "json-lines-gzip": read_json_lines,
    "json-document": read_json_document,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "text": read_text_file,
    "text-gzip": read_text_file,
}


def read_records(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of a slice, in order and some megabytes at a time.

    Raises:
        ConfigError: The file has no fields to read.
        DataError: The file cannot be read.
        MissingDependencyError: A package that reads this kind of file is not installed.
    """
    return _READERS[piece.kind](piece, fields)


def check_first_records(pieces: Iterable[InputSlice], fields: RecordFields) -> None:
    """Check that some file begins with a record that can be used.

    Of each file some megabytes are read, and no more files than it takes to find one.

    Args:
        pieces: Slices of the files; those that do not begin one are passed over.
        fields: What is read.

    Raises:
        DataError: All records are bad, most likely for want of the right flag; it is the error of
            the first.
    """
    first: DataError | None = None
    for piece in pieces:
        block = next(read_records(piece, fields), None) if not piece.start else None
        if block is None:
            continue
        if block.lines:
            return
        if first is None and block.bad:
            first = block.bad[0].error(piece.path)
    if first is not None:
        raise first


def lines_before(piece: InputSlice) -> int:
    """Lines or rows of the file before the slice, which are counted by reading up to it.

    Raises:
        DataError: The file cannot be read.
    """
    if piece.kind == "parquet":
        return rows_before(piece)
    return newlines_before(piece) if piece.start else 0


def check_fields(files: Iterable[SourceFile], fields: RecordFields) -> None:
    """Check what can be known of ``fields`` without reading.

    Raises:
        ConfigError: A file has no fields.
    """
    for file in files:
        if file.kind in ("text", "text-gzip"):
            check_text_fields(file.path, fields)

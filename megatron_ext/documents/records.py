"""Records of any kind of input file, and shards of about equal size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megatron_ext.conversation.records import RecordSchemaName, sniff_record_schema
from megatron_ext.documents.arrow_records import (
    read_arrow,
    read_parquet,
    row_group_sizes,
    rows_before,
)
from megatron_ext.documents.lines import newlines_before, read_json_document, read_json_lines
from megatron_ext.documents.record_fields import RecordBlock, RecordFields
from megatron_ext.documents.source_file import (
    InputSlice,
    SourceFile,
    SourceKind,
    check_text_fields,
    read_text_file,
)
from megatron_ext.errors import ConversationError, DataError


def cut_into_shards(
    files: Sequence[SourceFile], shard_count: int
) -> tuple[tuple[InputSlice, ...], ...]:
    """Divide the input, in order, into ``shard_count`` shards of about as many bytes.

    JSON lines are cut at any line, Parquet between row groups, anything else between files; a shard
    may come out empty where files are few and large.

    Raises:
        DataError: A Parquet file cannot be read.
        MissingDependencyError: pyarrow is not installed.
    """
    total = max(sum(file.size for file in files), 1)
    shards: list[list[InputSlice]] = [[] for _ in range(shard_count)]
    position = 0
    for file in files:
        offset = 0
        for piece in _pieces(file, _cuts(position, file.size, total, shard_count)):
            begin = position + offset
            # An empty file at the very end begins where the last shard stops.
            _add(shards[min(begin * shard_count // total, shard_count - 1)], piece)
            offset += piece.size
        position += file.size
    return tuple(tuple(shard) for shard in shards)


def _cuts(position: int, size: int, total: int, shard_count: int) -> list[int]:
    """Byte offsets in a file that begins at ``position`` of the input where shards begin."""
    first = position * shard_count // total + 1
    last = (position + size) * shard_count // total
    # Rounded up: the byte at a cut is the first of the new shard.
    return [-(-index * total // shard_count) - position for index in range(first, last + 1)]


def _pieces(file: SourceFile, cuts: Sequence[int]) -> Iterator[InputSlice]:
    """The slices of ``file`` that may go to different shards."""
    if file.kind == "json-lines":
        # A set, because cuts coincide where there are more shards than bytes.
        bounds = {0, *(cut for cut in cuts if cut < file.size), file.size}
        for start, stop in pairwise(sorted(bounds)):
            yield InputSlice(file.path, file.kind, start, stop, stop - start)
    elif file.kind == "parquet":
        sizes = row_group_sizes(file.path)
        # Row groups record uncompressed sizes; shards are balanced by bytes of the file.
        ends = [file.size * sum(sizes[: i + 1]) // max(sum(sizes), 1) for i in range(len(sizes))]
        for index, (begin, end) in enumerate(pairwise([0, *ends])):
            yield InputSlice(file.path, file.kind, index, index + 1, end - begin)
    else:
        yield InputSlice(file.path, file.kind, 0, file.size, file.size)


def _add(shard: list[InputSlice], piece: InputSlice) -> None:
    """Append ``piece``, merged with the slice before it if that is of the same file."""
    if shard and shard[-1].path == piece.path and shard[-1].stop == piece.start:
        before = shard.pop()
        piece = replace(piece, start=before.start, size=before.size + piece.size)
    shard.append(piece)


_READERS: Mapping[SourceKind, Callable[[InputSlice, RecordFields], Iterator[RecordBlock]]] = {
    "json-lines": read_json_lines,
    "json-lines-gzip": read_json_lines,
    "json-document": read_json_document,
    "json-document-gzip": read_json_document,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "text": read_text_file,
    "text-gzip": read_text_file,
}


def read_records(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of a slice, in order, in blocks of some megabytes.

    Raises:
        ConfigError: The file has no fields to read.
        DataError: The file cannot be read.
        MissingDependencyError: A package that reads this kind of file is not installed.
    """
    return _READERS[piece.kind](piece, fields)


def file_records(file: SourceFile, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of a whole file; see ``read_records``."""
    for piece in cut_into_shards([file], 1)[0]:
        yield from read_records(piece, fields)


def whole_records(file: SourceFile, fields: RecordFields) -> list[Any]:
    """The values of the first key in all records of a file.

    Raises:
        DataError: The file cannot be read, or a record cannot be used (with file and line).
        MissingDependencyError: A package that reads this kind of file is not installed.
    """
    values: list[Any] = []
    for block in file_records(file, fields):
        if block.bad:
            raise block.bad[0].error(file.path)
        values += block.columns[0]
    return values


def schema_of(records: Sequence[Any], *, key: str | None = None, where: object) -> RecordSchemaName:
    """Name of the one schema of all conversations.

    Args:
        records: Unchecked records; at least one.
        key: Field that holds the turns, where it has an unusual name.
        where: The file, for errors.

    Raises:
        DataError: No schema, or more than one, fits the records.
    """
    try:
        return sniff_record_schema(records, key=key)
    except ConversationError as error:
        raise DataError(str(error), where=where) from error


def check_first_records(pieces: Iterable[InputSlice], fields: RecordFields) -> None:
    """Check that at least one file has a usable record in its first block.

    Reads some megabytes of each file, up to the first usable record.

    Args:
        pieces: Slices of the files; only those that begin a file are read.
        fields: Fields that are read.

    Raises:
        DataError: All records are bad, most likely for want of the right flag; the error of the
            first is raised.
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
    """Lines or rows of the file before the slice, counted by reading the file up to it.

    Raises:
        DataError: The file cannot be read.
    """
    if piece.kind == "parquet":
        return rows_before(piece)
    return newlines_before(piece) if piece.start else 0


def check_fields(files: Iterable[SourceFile], fields: RecordFields) -> None:
    """Check that files of these kinds can have ``fields``, without reading them.

    Raises:
        ConfigError: A file of plain text is asked for fields.
    """
    for file in files:
        if file.kind in ("text", "text-gzip"):
            check_text_fields(file.path, fields)

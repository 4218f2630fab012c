"""Readers of Arrow and Parquet files, a block of records at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from megatron_ext.documents.lines import BLOCK_BYTES
from megatron_ext.documents.record_fields import (
    BadRecord,
    RecordBlock,
    RecordFields,
    check_record_size,
)
from megatron_ext.documents.source_file import InputSlice
from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.imports import needed_packages

_FILE_MAGIC: Final = b"ARROW1"
"""First bytes of an IPC file; a stream has none."""
_MOST_ROWS: Final = 1 << 13
"""Most rows of a block; dictionary encoding can make rows arbitrarily small in the file."""


def arrow_block(batch: Any, fields: RecordFields, first_line: int) -> RecordBlock:
    """The records of an Arrow record batch whose first row is row ``first_line`` of its slice."""
    block = RecordBlock.empty(fields)
    block.line_count = batch.num_rows
    rows = [None] * batch.num_rows
    with suppress(ValueError):
        # Offsets of a damaged file point anywhere, where reading would end the process.
        batch.validate(full=True)
        rows = rows if batch.nbytes > fields.most_bytes else batch.to_pylist()
    for offset, row in enumerate(rows):
        try:
            values = _decode_row(batch, offset, fields.most_bytes) if row is None else row
            block.add(first_line + offset, fields.values_of(values))
        except DataError as error:
            block.bad.append(BadRecord.of(first_line + offset, error))
    return block


def _decode_row(batch: Any, offset: int, most_bytes: int) -> Any:
    row = batch.slice(offset, 1)
    try:
        row.validate(full=True)
    except ValueError as error:
        problem, reason = "not UTF-8" if "UTF8" in str(error) else "damaged", str(error)
        raise DataError(f"the row is {problem}", got=reason.rpartition(": ")[2]) from error
    # A dictionary belongs to all rows.
    whole = [getattr(column, "dictionary_decode", lambda c=column: c)() for column in row.columns]
    check_record_size(sum(column.nbytes for column in whole), most_bytes)
    return row.to_pylist()[0]


@contextmanager
def arrow_batches(path: str) -> Iterator[Iterator[Any]]:
    """The record batches of a file in order; uncompressed ones are memory-mapped, not copied.

    Raises:
        DataError: The file is neither an IPC file nor a stream, or is damaged.
        MissingDependencyError: pyarrow is not installed.
    """
    with needed_packages("reading Arrow"):
        import pyarrow
    try:
        with pyarrow.memory_map(path) as source:
            yield _batches(source, pyarrow.ipc)
    except (OSError, ValueError) as error:
        # pyarrow's own errors are ValueErrors and OSErrors; so are ours.
        if isinstance(error, MegatronExtError):
            raise
        raise DataError("the Arrow file cannot be read", where=path, got=error) from error


def read_arrow(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of an Arrow file; only the columns of ``fields`` are read.

    Damage, or a missing field, ends the file with one bad record.

    Raises:
        DataError: The file is no Arrow file.
        MissingDependencyError: pyarrow is not installed.
    """
    line, size_left = 1, piece.size
    with arrow_batches(piece.path) as batches:
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    break
                batch = batch.select(fields.columns_of(batch.schema.names))
            except (OSError, ValueError) as error:
                if line == 1 and not isinstance(error, DataError):
                    raise
                yield _bad_block(fields, line, error, of="file")
                break
            for start in range(0, batch.num_rows, _MOST_ROWS):
                rows = batch.slice(start, _MOST_ROWS)
                block = arrow_block(rows, fields, line)
                block.size = min(rows.nbytes, size_left)
                line, size_left = line + rows.num_rows, size_left - block.size
                yield block
    yield RecordBlock(tuple([] for _ in fields.keys), size=size_left)


def _batches(source: Any, ipc: Any) -> Iterator[Any]:
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(0)
    if not is_file:
        return iter(ipc.open_stream(source))
    reader = ipc.open_file(source)
    return (reader.get_batch(index) for index in range(reader.num_record_batches))


def _bad_block(
    fields: RecordFields, line: int, error: Exception, *, of: str, rows: int = 1
) -> RecordBlock:
    """A block of one bad record that stands for ``rows`` rows from ``line`` on."""
    block = RecordBlock.empty(fields)
    is_ours = isinstance(error, DataError)
    problem = error if is_ours else DataError(f"the {of} is damaged from this row on", got=error)
    block.bad.append(BadRecord.of(line, problem, rows=rows))
    block.line_count = rows
    return block


def row_group_sizes(path: str) -> list[int]:
    """Uncompressed bytes of each row group of a Parquet file.

    Raises:
        DataError: The file is damaged or no Parquet file.
        MissingDependencyError: pyarrow is not installed.
    """
    with _open(path) as file:
        groups = range(file.metadata.num_row_groups)
        return [file.metadata.row_group(index).total_byte_size for index in groups]


def read_parquet(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of the row groups of a slice; only the columns of ``fields`` are read.

    A damaged row group, or one that lacks a field, becomes one bad record that counts for all of
    its remaining rows.

    Raises:
        DataError: The file is no Parquet file.
        MissingDependencyError: pyarrow is not installed.
    """
    with _open(piece.path) as file:
        total = sum(file.metadata.row_group(i).num_rows for i in range(piece.start, piece.stop))
        rows_read = 0
        for index in range(piece.start, piece.stop):
            for block in _row_group(file, index, fields, first_line=rows_read + 1):
                share = piece.size * rows_read // max(total, 1)
                rows_read += block.line_count
                block.size = piece.size * rows_read // max(total, 1) - share
                yield block


def rows_before(piece: InputSlice) -> int:
    """Rows of a Parquet file before the slice.

    Raises:
        DataError: The file is no Parquet file.
    """
    with _open(piece.path) as file:
        return sum(file.metadata.row_group(index).num_rows for index in range(piece.start))


def _row_group(
    file: Any, index: int, fields: RecordFields, *, first_line: int
) -> Iterator[RecordBlock]:
    columns = file.schema_arrow.names
    line, stop = first_line, first_line + file.metadata.row_group(index).num_rows
    try:
        batches = file.iter_batches(
            batch_size=_batch_rows(file.metadata.row_group(index)),
            row_groups=[index],
            columns=fields.columns_of(columns),
        )
        for batch in batches:
            yield arrow_block(batch, fields, line)
            line += batch.num_rows
    except (DataError, OSError, ValueError) as error:
        # pyarrow's own errors are ValueErrors and OSErrors.
        yield _bad_block(fields, line, error, of="row group", rows=stop - line)


def _batch_rows(group: Any) -> int:
    """Rows of a block of about ``BLOCK_BYTES``, at the row group's mean row size."""
    rows = group.num_rows * BLOCK_BYTES // max(group.total_byte_size, 1)
    return int(min(max(rows, 1), _MOST_ROWS))


@contextmanager
def _open(path: str) -> Iterator[Any]:
    with needed_packages("reading Parquet"):
        from pyarrow.parquet import ParquetFile
    try:
        file = ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError("the Parquet file cannot be read", where=path, got=error) from error
    with file:
        yield file

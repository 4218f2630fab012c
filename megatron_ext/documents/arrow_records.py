"""Records of Arrow and Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from megatron_ext.documents.lines import BLOCK_BYTES
from megatron_ext.documents.record_fields import BadRecord, RecordBlock, RecordFields
from megatron_ext.documents.source_file import InputSlice
from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.extras import needed_packages

_FILE_MAGIC: Final = b"ARROW1"
"""How an IPC file begins; a stream does not."""
_MOST_ROWS: Final = 1 << 13
"""Rows read at once, however small a dictionary makes them."""


def arrow_block(batch: Any, fields: RecordFields, first_line: int) -> RecordBlock:
    """The rows of a record batch, of which the first is row ``first_line`` of its slice."""
    block = RecordBlock.empty(fields)
    block.line_count = batch.num_rows
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [None] * batch.num_rows
    for offset, row in enumerate(rows):
        try:
            values = _one_row(batch, offset) if row is None else row
            block.add(first_line + offset, fields.values_of(values))
        except DataError as error:
            block.bad.append(BadRecord.of(first_line + offset, error))
    return block


def _one_row(batch: Any, offset: int) -> Any:
    try:
        return batch.slice(offset, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        raise DataError(
            "the row is not UTF-8", got=f"{error.reason} at byte {error.start}"
        ) from error


@contextmanager
def arrow_batches(path: str) -> Iterator[Iterator[Any]]:
    """The record batches of a file, in order; those that are not compressed are not copied.

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
    """The records of a file; columns that are no field are not read.

    From where the file is damaged on, and where it lacks a field, it gives one bad record.

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
                yield _broken(fields, line, error, of="file")
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


def _broken(
    fields: RecordFields, line: int, error: Exception, *, of: str, rows: int = 1
) -> RecordBlock:
    """One bad record, which stands for all rows from ``line`` on."""
    block = RecordBlock.empty(fields)
    is_ours = isinstance(error, DataError)
    problem = error if is_ours else DataError(f"the {of} is damaged from this row on", got=error)
    block.bad.append(BadRecord.of(line, problem, rows=rows))
    block.line_count = rows
    return block


def row_group_sizes(path: str) -> list[int]:
    """Bytes of each row group before compression.

    Raises:
        DataError: The file is damaged or no Parquet file.
        MissingDependencyError: pyarrow is not installed.
    """
    with _open(path) as file:
        groups = range(file.metadata.num_row_groups)
        return [file.metadata.row_group(index).total_byte_size for index in groups]


def read_parquet(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of some row groups; columns that are no field are not read.

    A row group that is damaged, and every one of a file that lacks a field, is one bad record that
    counts for all of its rows.

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
    """Rows of the file before the slice.

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
        yield _broken(fields, line, error, of="row group", rows=stop - line)


def _batch_rows(group: Any) -> int:
    """Rows of a row group that make a block."""
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

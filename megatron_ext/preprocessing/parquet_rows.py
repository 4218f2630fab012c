"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from megatron_ext.errors import DataError
from megatron_ext.extras import needed_packages
from megatron_ext.preprocessing.arrow_block import arrow_block
from megatron_ext.preprocessing.bad_record import BadRecord
from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.line_block import BLOCK_BYTES
from megatron_ext.preprocessing.record_block import RecordBlock, RecordFields

_MOST_ROWS: Final = 1 << 13
"""Rows read at once, however small a dictionary makes them."""


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
        block = RecordBlock.empty(fields)
        problem = error if isinstance(error, DataError) else _damaged(error)
        block.bad.append(BadRecord.of(line, problem, rows=stop - line))
        block.line_count = stop - line
        yield block


def _batch_rows(group: Any) -> int:
    """Rows of a row group that make a block."""
    rows = group.num_rows * BLOCK_BYTES // max(group.total_byte_size, 1)
    return int(min(max(rows, 1), _MOST_ROWS))


def _damaged(error: Exception) -> DataError:
    return DataError("the row group is damaged from this row on", got=error)


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

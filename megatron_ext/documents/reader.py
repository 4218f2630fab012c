"""``RecordReader``: random access to the records of Arrow, Parquet and JSON lines files."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, BinaryIO, Final, Protocol

from megatron_ext.documents.arrow_records import arrow_batches
from megatron_ext.documents.lines import parse, read_line
from megatron_ext.documents.record_fields import RecordFields
from megatron_ext.documents.source_file import SourceFile
from megatron_ext.errors import DataError

_FILES_OPEN: Final = 16
_ROW_GROUPS_KEPT: Final = 2
"""Row groups of a Parquet file kept in memory; documents are read in runs of neighbours."""


class _File(Protocol):
    def record(self, row: int, start: int) -> Any: ...


class RecordReader:
    """Reads records by their place; picklable.

    Args:
        files: The files, of the kinds in ``READ_IN_PLACE``.
        fields: Columns that are read of Arrow and Parquet files.
    """

    def __init__(self, files: Sequence[SourceFile], fields: RecordFields) -> None:
        self.files = tuple(files)
        self._fields = fields
        self._opened: OrderedDict[int, _File] = OrderedDict()

    def record(self, file: int, row: int, start: int) -> Any:
        """One record.

        Args:
            file: Number of the file.
            row: Row or line, from 1.
            start: Byte offset of the line, in JSON lines.

        Raises:
            DataError: The file has changed or cannot be read, or the line is not JSON.
        """
        return self._file(file).record(row, start)

    def place(self, file: int, row: int) -> str:
        """``file:row`` of a record."""
        return f"{self.files[file].path}:{row}"

    def _file(self, number: int) -> _File:
        if number in self._opened:
            self._opened.move_to_end(number)
            return self._opened[number]
        file = self.files[number]
        with _opened(file):
            self._opened[number] = opened = READ_IN_PLACE[file.kind](file, self._fields)
        if len(self._opened) > _FILES_OPEN:
            self._opened.popitem(last=False)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}


class _Lines:
    """Rows of a JSON lines file."""

    def __init__(self, file: SourceFile, fields: RecordFields) -> None:
        self._file = file
        self._most_bytes = fields.most_bytes

    def record(self, row: int, start: int) -> Any:
        with _opened(self._file) as stream:
            line = read_line(stream, start, self._most_bytes)
        return parse(line, most_bytes=self._most_bytes)


class _ArrowRows:
    """Rows of an Arrow file, memory-mapped."""

    def __init__(self, file: SourceFile, fields: RecordFields) -> None:
        self._batches: list[Any] = []
        # The map lives as long as an array that points into it. Rows behind damage are not indexed.
        with arrow_batches(file.path) as batches, suppress(OSError, ValueError):
            for batch in batches:
                self._batches.append(batch.select(fields.columns_of(batch.schema.names)))
        self._stops = list(accumulate(batch.num_rows for batch in self._batches))

    def record(self, row: int, start: int) -> Any:
        number = bisect_right(self._stops, row - 1)
        batch = self._batches[number]
        return _row(batch, row - 1 - self._stops[number] + batch.num_rows)


class _ParquetRows:
    """Rows of a Parquet file, read a row group at a time."""

    def __init__(self, file: SourceFile, fields: RecordFields) -> None:
        from pyarrow.parquet import ParquetFile

        self._file = ParquetFile(file.path, memory_map=True)
        metadata = self._file.metadata
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        self._stops = list(accumulate(sizes))
        self._columns = fields.columns_of(self._file.schema_arrow.names)
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def record(self, row: int, start: int) -> Any:
        number = bisect_right(self._stops, row - 1)
        if number not in self._groups:
            self._groups[number] = self._file.read_row_group(number, columns=self._columns)
            if len(self._groups) > _ROW_GROUPS_KEPT:
                self._groups.popitem(last=False)
        group = self._groups[number]
        return _row(group, row - 1 - self._stops[number] + group.num_rows)


def _row(table: Any, index: int) -> dict[str, Any]:
    """One row of an Arrow table or batch."""
    return {
        name: column[index].as_py()
        for name, column in zip(table.schema.names, table.columns, strict=True)
    }


READ_IN_PLACE: Final[dict[str, Callable[[SourceFile, RecordFields], _File]]] = {
    "json-lines": _Lines,
    "parquet": _ParquetRows,
    "arrow": _ArrowRows,
}
"""Readers of the kinds with random access to rows; the text of others is copied into the cache."""


@contextmanager
def _opened(file: SourceFile) -> Iterator[BinaryIO]:
    """Open a file, refusing one that has changed since it was indexed."""
    try:
        with open(file.path, "rb") as stream:
            status = os.fstat(stream.fileno())
            if (status.st_size, status.st_mtime_ns) != (file.size, file.modified):
                raise changed(file)
            yield stream
    except OSError as error:
        raise DataError("the file cannot be read", got=error.strerror, where=file.path) from error


def changed(file: SourceFile) -> DataError:
    """The error of a file that has changed since it was indexed."""
    return DataError(
        "the file has changed since the data set was built", fix="build it again", where=file.path
    )

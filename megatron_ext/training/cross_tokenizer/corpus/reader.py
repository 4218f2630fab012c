"""Documents of a corpus by number, wherever they are."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final, Protocol

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.errors import DataError
from megatron_ext.preprocessing.arrow_rows import arrow_batches
from megatron_ext.preprocessing.json_line import parse
from megatron_ext.preprocessing.record_block import RecordFields
from megatron_ext.preprocessing.source_file import SourceFile
from megatron_ext.training.sft.cache import CachedArrays

_FILES_OPEN: Final = 16
_ROW_GROUPS_KEPT: Final = 2
"""Row groups of a Parquet file that are kept in memory; documents are read in runs of neighbours,
so one after the other."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class _File(Protocol):
    def record(self, row: int, start: int) -> Any: ...


class DocumentReader:
    """Reads documents; it can be sent to another process.

    Args:
        files: The files.
        fields: Which field holds the document, a text or a conversation.
        index: Where the documents are.
    """

    def __init__(
        self, files: Sequence[SourceFile], fields: RecordFields, index: CachedArrays
    ) -> None:
        self._files = tuple(files)
        self._fields = fields
        self._index = index
        self._opened: OrderedDict[int, _File] = OrderedDict()

    def document(self, number: int) -> str | ConversationRecord:
        """One document.

        Raises:
            DataError: The file has changed, or cannot be read any more.
        """
        arrays = self._index
        file, start, size = (int(arrays[name][number]) for name in ("file", "start", "size"))
        if self._files[file].kind not in _KINDS:
            return arrays["texts"][start : start + size].tobytes().decode()
        record = self._file(file).record(int(arrays["row"][number]), start)
        try:
            document: str | ConversationRecord = self._fields.values_of(record)[0]
        except DataError as error:
            raise _changed(self._files[file]) from error
        return document

    def place(self, number: int) -> str:
        """``file:row`` of a document."""
        file = self._files[int(self._index["file"][number])]
        return f"{file.path}:{int(self._index['row'][number])}"

    def _file(self, number: int) -> _File:
        if number in self._opened:
            self._opened.move_to_end(number)
            return self._opened[number]
        file = self._files[number]
        _check_unchanged(file)
        self._opened[number] = opened = _KINDS[file.kind](file.path, self._fields)
        if len(self._opened) > _FILES_OPEN:
            self._opened.popitem(last=False)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict()}


class _Lines:
    """A JSON lines file."""

    def __init__(self, path: str, fields: RecordFields) -> None:
        self._path = path

    def record(self, row: int, start: int) -> Any:
        with open(self._path, "rb") as stream:
            stream.seek(start)
            line = stream.readline()
        return parse(line if start else line.removeprefix(_BYTE_ORDER_MARK))


class _ArrowRows:
    """An Arrow file, mapped into memory."""

    def __init__(self, path: str, fields: RecordFields) -> None:
        self._batches: list[Any] = []
        # The map lives as long as an array that points into it. The index holds no row from where
        # the file is damaged on.
        with arrow_batches(path) as batches, suppress(OSError, ValueError):
            for batch in batches:
                self._batches.append(batch.select(fields.columns_of(batch.schema.names)))
        self._stops = list(accumulate(batch.num_rows for batch in self._batches))

    def record(self, row: int, start: int) -> Any:
        number = bisect_right(self._stops, row - 1)
        batch = self._batches[number]
        return _row(batch, row - 1 - self._stops[number] + batch.num_rows)


class _ParquetRows:
    """A Parquet file, a row group at a time."""

    def __init__(self, path: str, fields: RecordFields) -> None:
        from pyarrow.parquet import ParquetFile

        self._file = ParquetFile(path, memory_map=True)
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


_KINDS: Final[dict[str, Callable[[str, RecordFields], _File]]] = {
    "json-lines": _Lines,
    "parquet": _ParquetRows,
    "arrow": _ArrowRows,
}


def _check_unchanged(file: SourceFile) -> None:
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise DataError("the file cannot be read", got=error.strerror, where=file.path) from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified):
        raise _changed(file)


def _changed(file: SourceFile) -> DataError:
    return DataError(
        "the file has changed since the data set was built", fix="build it again", where=file.path
    )

"""Rows of Arrow files: IPC files and streams, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.extras import needed_packages
from megatron_ext.preprocessing.arrow_block import arrow_block
from megatron_ext.preprocessing.bad_record import BadRecord
from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.record_block import RecordBlock, RecordFields

_FILE_MAGIC: Final = b"ARROW1"
"""How an IPC file begins; a stream does not."""

_ROWS_AT_ONCE: Final = 1 << 13


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
                yield _broken(fields, line, error)
                break
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                rows = batch.slice(start, _ROWS_AT_ONCE)
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


def _broken(fields: RecordFields, line: int, error: Exception) -> RecordBlock:
    block = RecordBlock.empty(fields)
    is_ours = isinstance(error, DataError)
    problem = error if is_ours else DataError("the file is damaged from this row on", got=error)
    block.bad.append(BadRecord.of(line, problem))
    block.line_count = 1
    return block

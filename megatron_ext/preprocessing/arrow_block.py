"""Record batches of Arrow as blocks of records."""

from __future__ import annotations

from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.preprocessing.bad_record import BadRecord
from megatron_ext.preprocessing.record_block import RecordBlock, RecordFields


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

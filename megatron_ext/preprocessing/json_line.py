"""JSON lines, parsed as fast as the installed packages allow and judged alike by all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.preprocessing.bad_record import BadRecord
from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.line_block import read_lines
from megatron_ext.preprocessing.record_block import RecordBlock, RecordFields

try:
    from orjson import loads as _fast_loads
except ImportError:
    _fast_loads: Callable[[bytes], Any] | None = None  # type: ignore[no-redef]


def read_json_lines(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of a slice of a JSON lines file; blank lines are none.

    Raises:
        DataError: The file cannot be read.
    """
    line = 1
    for lines in read_lines(piece):
        block = parse_lines(lines.lines, fields, first_line=line)
        block.size = lines.size
        line += len(lines.lines)
        if lines.bad is not None:
            block.bad.append(lines.bad)
            line += 1
            block.line_count += 1
        yield block


def parse_lines(lines: Sequence[bytes], fields: RecordFields, *, first_line: int) -> RecordBlock:
    """The records in ``lines``, the first of which is line ``first_line`` of its slice."""
    block = RecordBlock.empty(fields)
    block.line_count = len(lines)
    for number, line in enumerate(lines, start=first_line):
        if not line or line.isspace():
            continue
        try:
            block.add(number, fields.values_of(parse(line)))
        except DataError as error:
            block.bad.append(BadRecord.of(number, error))
    return block


def parse(line: bytes) -> Any:
    """The JSON value in ``line``, whose strings all fit into UTF-8.

    Raises:
        DataError: It is not UTF-8, not JSON, or spells half of a surrogate pair.
    """
    if _fast_loads is not None:
        try:
            return _fast_loads(line)
        except ValueError:
            # orjson is stricter than json (NaN, halves of surrogate pairs, deep nesting) and says
            # less: what it refuses is judged below, so that results do not depend on it.
            pass
    return _parse_slowly(line)


def _parse_slowly(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
        value = json.loads(text)
        if "\\u" in text:
            _refuse_surrogates(value)
    except DataError:
        # It is a ValueError, too, and says already what is wrong.
        raise
    except UnicodeDecodeError as error:
        raise DataError(
            "the line is not UTF-8", got=f"{error.reason} at byte {error.start} of the line"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(
            "the line is not JSON", got=f"{error.msg} at character {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError("the line is not JSON", got=error) from error
    return value


def _refuse_surrogates(value: Any) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            "the text holds half of a surrogate pair, which UTF-8 cannot",
            fix='clean it: text.encode("utf-8", "replace").decode()',
        ) from None

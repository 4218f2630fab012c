"""Readers of JSON lines and JSON lists, plain or gzip-compressed, a block at a time."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, BinaryIO, Final

from megatron_ext.documents.record_fields import (
    MOST_RECORD_BYTES,
    BadRecord,
    RecordBlock,
    RecordFields,
    check_record_size,
)
from megatron_ext.documents.source_file import InputSlice, whole_text
from megatron_ext.errors import DataError, refused_by_system

BLOCK_BYTES: Final = 8 << 20
"""Bytes of a block, up to its last line: enough to keep the threads of a tokenizer busy."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive lines.

    Attributes:
        lines: Bytes of each without the newline; a carriage return stays. A line that is too long
            for a record is cut off behind the limit.
        size: Bytes of the file that were read for the block.
        bad: Error of a file that breaks off behind the lines.
        starts: Byte offset of each line; empty for a compressed file.
    """

    lines: list[bytes]
    size: int
    bad: BadRecord | None = None
    starts: list[int] = field(default_factory=list)


def read_lines(piece: InputSlice, most_bytes: int = MOST_RECORD_BYTES) -> Iterator[LineBlock]:
    """The lines of a slice of a JSON lines file; no more of a line is held than ``most_bytes``.

    Raises:
        DataError: The file cannot be read, or was truncated since it was listed.
    """
    read = _gzip_blocks if piece.kind == "json-lines-gzip" else _plain_blocks
    with refused_by_system("the input cannot be read", where=piece.path):
        for index, block in enumerate(read(piece, most_bytes)):
            if index == 0 and piece.start == 0 and block.lines:
                block.lines[0] = block.lines[0].removeprefix(_BYTE_ORDER_MARK)
            yield block


def read_line(stream: BinaryIO, start: int, most_bytes: int = MOST_RECORD_BYTES) -> bytes:
    """The line that begins at byte ``start``, cut off behind the limit of ``most_bytes``."""
    stream.seek(start)
    line = stream.readline(most_bytes + 1)
    return line if start else line.removeprefix(_BYTE_ORDER_MARK)


def newlines_before(piece: InputSlice) -> int:
    """Lines of a file before the first line that begins in a slice with ``start`` above 0.

    Raises:
        DataError: The file cannot be read.
    """
    count, position = 1, 0
    with (
        refused_by_system("the input cannot be read", where=piece.path),
        open(piece.path, "rb") as stream,
    ):
        # The newline that precedes the slice's first line may be at or behind ``start``.
        while position < piece.start - 1:
            content = stream.read(min(BLOCK_BYTES, piece.start - 1 - position))
            count += content.count(b"\n")
            position += len(content)
            if not content:
                break
    return count


def _plain_blocks(piece: InputSlice, most_bytes: int) -> Iterator[LineBlock]:
    with open(piece.path, "rb") as stream:
        position = piece.start
        if position:
            # A line that begins before the slice belongs to the slice before; reading from one byte
            # earlier tells whether a line begins exactly at ``start``.
            stream.seek(position - 1)
            position += _skip_line(stream) - 1
        while position < piece.stop:
            content = stream.read(min(BLOCK_BYTES, piece.stop - position))
            if not content:
                raise DataError(
                    "the input has become shorter while it was read",
                    where=piece.path,
                    got=f"{position} bytes",
                    expected=f"{piece.stop}",
                )
            if not content.endswith(b"\n"):
                content += stream.readline(most_bytes + 1)
            size = len(content) + (0 if content.endswith(b"\n") else _skip_line(stream))
            lines = _split(content)
            starts = list(accumulate((len(line) + 1 for line in lines[:-1]), initial=position))
            position += size
            yield LineBlock(lines, size, starts=starts)


def _skip_line(stream: BinaryIO) -> int:
    """Bytes to the end of the line, newline included, or of the file; they are read."""
    size = 0
    while part := stream.readline(BLOCK_BYTES):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _gzip_blocks(piece: InputSlice, most_bytes: int) -> Iterator[LineBlock]:
    with open(piece.path, "rb") as raw, gzip.open(raw) as stream:
        rest, count, position = b"", 0, 0
        while True:
            content, problem = _read_gzip(stream)
            at_end = len(content) < BLOCK_BYTES
            content = rest + content
            rest = b""
            if not at_end or problem is not None:
                whole = content.rfind(b"\n") + 1
                content, rest = content[:whole], content[whole : whole + most_bytes + 1]
            lines = _split(content)
            count += len(lines)
            bad = None if problem is None else BadRecord.of(count + 1, problem)
            # The unread rest of a broken stream counts as read.
            end = piece.stop if at_end else raw.tell()
            yield LineBlock(lines, end - position, bad)
            position = end
            if at_end:
                return


def _read_gzip(stream: gzip.GzipFile) -> tuple[bytes, DataError | None]:
    """Up to ``BLOCK_BYTES`` decompressed bytes, and the error of the stream behind them, if any."""
    parts: list[bytes] = []
    size = 0
    while size < BLOCK_BYTES:
        try:
            # ``read`` would discard what it has when the stream breaks off; ``read1`` does not.
            part = stream.read1(BLOCK_BYTES - size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            problem = DataError(
                "the compressed file is cut off or damaged from this line on", got=error
            )
            return b"".join(parts), problem
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts), None


def _split(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


try:
    from orjson import loads as _fast_loads
except ImportError:
    _fast_loads: Callable[[bytes], Any] | None = None  # type: ignore[no-redef]

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()


def read_json_lines(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of a slice of a JSON lines file; blank lines do not count.

    Raises:
        DataError: The file cannot be read.
    """
    line = 1
    for lines in read_lines(piece, fields.most_bytes):
        block = parse_lines(lines.lines, fields, first_line=line)
        block.size, block.starts = lines.size, lines.starts
        line += len(lines.lines)
        if lines.bad is not None:
            block.bad.append(lines.bad)
            line += 1
            block.line_count += 1
        yield block


def parse_lines(lines: Sequence[bytes], fields: RecordFields, *, first_line: int) -> RecordBlock:
    """The records of ``lines``; the first is line ``first_line`` of its slice."""
    block = RecordBlock.empty(fields)
    block.line_count = len(lines)
    for number, line in enumerate(lines, start=first_line):
        if not line or line.isspace():
            continue
        try:
            block.add(number, fields.values_of(_parsed(line, fields)))
        except DataError as error:
            block.bad.append(BadRecord.of(number, error))
    return block


def _parsed(line: bytes, fields: RecordFields) -> Any:
    return parse(line, as_it_is=fields.are_unread, most_bytes=fields.most_bytes)


def parse(line: bytes, *, as_it_is: bool = False, most_bytes: int = MOST_RECORD_BYTES) -> Any:
    """The JSON value in ``line``, with strings that can be encoded as UTF-8.

    Args:
        line: UTF-8 bytes.
        as_it_is: Allow strings with unpaired surrogates.
        most_bytes: Bytes that a record may have.

    Raises:
        DataError: The line is not UTF-8, not JSON, too long, or holds an unpaired surrogate.
    """
    check_record_size(len(line), most_bytes)
    if _fast_loads is not None:
        try:
            return _fast_loads(line)
        except ValueError:
            # orjson is stricter than json (NaN, unpaired surrogates, deep nesting): json has the
            # last word, so that results do not depend on whether orjson is installed.
            pass
    return _parse_slowly(line, as_it_is)


def _parse_slowly(line: bytes, as_it_is: bool) -> Any:
    try:
        text = line.decode("utf-8")
        value = json.loads(text)
        if "\\u" in text and not as_it_is:
            _refuse_surrogates(value)
    except DataError:
        # A ValueError too, with a better message than the one below.
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
    """Refuse unpaired surrogates, which JSON can escape and no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            "the text holds half of a surrogate pair, which UTF-8 cannot",
            fix='clean it: text.encode("utf-8", "replace").decode()',
        ) from None


def read_json_document(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The records of a JSON list, each at the line in which it begins; held in memory whole.

    A syntax error ends the list with one bad record.

    Raises:
        DataError: The file cannot be read.
    """
    block, size_left = RecordBlock.empty(fields), piece.size
    line = seen = 0
    text = whole_text(piece)
    if isinstance(text, BadRecord):
        block.bad.append(text)
        text = "[]"
    try:
        for start, stop in _elements(text):
            line += text.count("\n", seen, start)
            seen = start
            record = text[start:stop].encode()
            _add(block, fields, record, line + 1)
            block.size += min(len(record), size_left)
            size_left -= min(len(record), size_left)
            if block.size >= BLOCK_BYTES:
                yield block
                block = RecordBlock.empty(fields)
        block.line_count = text.count("\n") + 1
    except json.JSONDecodeError as error:
        what = DataError("the document is not JSON from this line on", got=error.msg)
        block.bad.append(BadRecord.of(error.lineno, what))
    block.size += size_left
    yield block


def _add(block: RecordBlock, fields: RecordFields, record: bytes, line: int) -> None:
    try:
        block.add(line, fields.values_of(_parsed(record, fields)))
    except DataError as error:
        block.bad.append(BadRecord.of(line, error))


def _elements(text: str) -> Iterator[tuple[int, int]]:
    """Start and stop of each element of the list in ``text``.

    Raises:
        JSONDecodeError: The text stops being a JSON list.
    """
    at = _after_space(text, text.index("[") + 1)
    while text[at : at + 1] != "]":
        try:
            _, stop = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise json.JSONDecodeError("Nested too deeply", text, at) from None
        yield at, stop
        at = _after_space(text, stop)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    rest = _after_space(text, at + 1)
    if rest < len(text):
        raise json.JSONDecodeError("Extra data", text, rest)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()

"""Lines of a file, many at a time and as bytes; plain or compressed."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import BinaryIO, Final

from megatron_ext.documents.record_fields import BadRecord
from megatron_ext.documents.source_file import InputSlice
from megatron_ext.errors import DataError

BLOCK_BYTES: Final = 8 << 20
"""Bytes of a block, but for its last line: enough to keep the threads of a tokenizer busy."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive lines.

    Attributes:
        lines: Their bytes without the newlines; a carriage return stays.
        size: Bytes of the file that were read for them.
        bad: That the file breaks off behind them.
        starts: Byte at which each begins; empty where the file is compressed.
    """

    lines: list[bytes]
    size: int
    bad: BadRecord | None = None
    starts: list[int] = field(default_factory=list)


def read_lines(piece: InputSlice) -> Iterator[LineBlock]:
    """The lines of a slice of a JSON lines file.

    Raises:
        DataError: The file cannot be read, or has become shorter.
    """
    read = _gzip_blocks if piece.kind == "json-lines-gzip" else _plain_blocks
    try:
        for index, block in enumerate(read(piece)):
            if index == 0 and piece.start == 0 and block.lines:
                block.lines[0] = block.lines[0].removeprefix(_BYTE_ORDER_MARK)
            yield block
    except OSError as error:
        raise _unreadable(piece, error) from error


def read_line(stream: BinaryIO, start: int) -> bytes:
    """The line of a JSON lines file that begins at byte ``start``."""
    stream.seek(start)
    line = stream.readline()
    return line if start else line.removeprefix(_BYTE_ORDER_MARK)


def newlines_before(piece: InputSlice) -> int:
    """Lines of a file before the first that begins in the slice, which does not begin the file.

    Raises:
        DataError: The file cannot be read.
    """
    count, position = 1, 0
    try:
        with open(piece.path, "rb") as stream:
            # The newline before the slice's first line is at its start or behind it.
            while position < piece.start - 1:
                content = stream.read(min(BLOCK_BYTES, piece.start - 1 - position))
                count += content.count(b"\n")
                position += len(content)
                if not content:
                    break
    except OSError as error:
        raise _unreadable(piece, error) from error
    return count


def _plain_blocks(piece: InputSlice) -> Iterator[LineBlock]:
    with open(piece.path, "rb") as stream:
        position = piece.start
        if position:
            # The line in which the slice begins belongs to the slice before it, unless it begins
            # with it: reading on from one byte earlier tells.
            stream.seek(position - 1)
            position += len(stream.readline()) - 1
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
                content += stream.readline()
            lines = _split(content)
            starts = list(accumulate((len(line) + 1 for line in lines[:-1]), initial=position))
            position += len(content)
            yield LineBlock(lines, len(content), starts=starts)


def _gzip_blocks(piece: InputSlice) -> Iterator[LineBlock]:
    with open(piece.path, "rb") as raw, gzip.open(raw) as stream:
        rest, count, position = b"", 0, 0
        while True:
            content, problem = _read_gzip(stream)
            at_end = len(content) < BLOCK_BYTES
            content = rest + content
            rest = b""
            if not at_end or problem is not None:
                whole = content.rfind(b"\n") + 1
                content, rest = content[:whole], content[whole:]
            lines = _split(content)
            count += len(lines)
            bad = None if problem is None else BadRecord.of(count + 1, problem)
            # What a broken stream leaves unread is done with, too.
            end = piece.stop if at_end else raw.tell()
            yield LineBlock(lines, end - position, bad)
            position = end
            if at_end:
                return


def _read_gzip(stream: gzip.GzipFile) -> tuple[bytes, DataError | None]:
    """Up to ``BLOCK_BYTES``, fewer at the end, and what is wrong with the stream behind them."""
    parts: list[bytes] = []
    size = 0
    while size < BLOCK_BYTES:
        try:
            # Not read, which would throw away what it has when the stream breaks off.
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


def _unreadable(piece: InputSlice, error: OSError) -> DataError:
    return DataError("the input cannot be read", where=piece.path, got=error.strerror)

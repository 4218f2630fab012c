"""Plain text files, of one document each."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.preprocessing.bad_record import BadRecord
from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.record_block import RecordBlock, RecordFields


def check_text_fields(path: str, fields: RecordFields) -> None:
    """Check that a file without fields can give what is asked for.

    Raises:
        ConfigError: Several fields, or conversations.
    """
    if fields.content == "conversation":
        raise ConfigError(
            "plain text holds no conversations",
            where=path,
            expected="JSON lines or Parquet",
            fix="name files of records as the input",
        )
    if len(fields.keys) > 1:
        raise ConfigError(
            "plain text has no fields",
            where=path,
            got=f"the keys {', '.join(fields.keys)}",
            fix=f"leave {fields.flag} out, or name files of records as the input",
        )


def read_text_file(piece: InputSlice, fields: RecordFields) -> Iterator[RecordBlock]:
    """The one document of a file, as one record.

    Raises:
        ConfigError: ``check_text_fields`` refuses the file.
        DataError: It cannot be read.
    """
    check_text_fields(piece.path, fields)
    block = RecordBlock.empty(fields)
    block.line_count, block.size = 1, piece.size
    try:
        block.add(1, [_content(piece).decode("utf-8")])
    except UnicodeDecodeError as error:
        problem = DataError("the text is not UTF-8", got=f"{error.reason} at byte {error.start}")
        block.bad.append(BadRecord.of(None, problem))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = DataError("the compressed file is cut off or damaged", got=error)
        block.bad.append(BadRecord.of(None, problem))
    except OSError as error:
        raise DataError("the input cannot be read", where=piece.path, got=error.strerror) from error
    yield block


def _content(piece: InputSlice) -> bytes:
    content = Path(piece.path).read_bytes()
    return gzip.decompress(content) if piece.kind == "text-gzip" else content

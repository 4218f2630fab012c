"""Plain text files, of one document each."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.documents.record_fields import BadRecord, RecordBlock, RecordFields
from megatron_ext.documents.source_file import InputSlice
from megatron_ext.errors import ConfigError, DataError


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
    text = whole_text(piece)
    if isinstance(text, BadRecord):
        block.bad.append(text)
    else:
        block.add(1, [text])
    yield block


def whole_text(piece: InputSlice) -> str | BadRecord:
    """All text of a file, or why it has none.

    Raises:
        DataError: It cannot be read.
    """
    try:
        content = Path(piece.path).read_bytes()
        return (gzip.decompress(content) if piece.kind.endswith("-gzip") else content).decode()
    except UnicodeDecodeError as error:
        what = DataError("the text is not UTF-8", got=f"{error.reason} at byte {error.start}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = DataError("the compressed file is cut off or damaged", got=error)
    except OSError as error:
        raise DataError("the input cannot be read", where=piece.path, got=error.strerror) from error
    return BadRecord.of(None, what)

"""Rows of a local data file of a task, whatever format it was published in."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from megatron_ext.documents.record_fields import AS_THEY_ARE, RecordFields
from megatron_ext.documents.records import whole_records
from megatron_ext.documents.source_file import source_file, source_kind
from megatron_ext.errors import DataError

Row = dict[str, Any]


def read_records(path: Path) -> list[Row]:
    """The records of a file of JSON lines, a JSON list, Parquet or Arrow, gzipped or not.

    Raises:
        DataError: It cannot be read, holds no records, or is of another format.
        MissingDependencyError: It is Parquet or Arrow, and pyarrow is missing.
    """
    kind = source_kind(path)
    if not path.is_file():
        raise DataError(
            "this is a folder" if path.is_dir() else "there is no such file or folder",
            where=path,
            expected="a data file, or a folder of them where a task says so",
            fix="correct the path",
        )
    if kind in ("text", "text-gzip"):
        raise DataError(
            "this is no data file by its suffix",
            where=path,
            got=path.suffix or "no suffix",
            expected="one of .jsonl, .json, .parquet, .arrow, .csv where a task says so",
        )
    records = whole_records(source_file(path, kind), AS_THEY_ARE)
    if not records or not all(isinstance(record, dict) for record in records):
        raise DataError("the file holds no records", where=path, expected="at least one object")
    return records


def read_csv(path: Path) -> list[list[str]]:
    """The rows of a CSV file.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return [row for row in csv.reader(io.StringIO(read_text(path), newline="")) if row]
    except csv.Error as error:
        raise DataError("the file is no CSV", where=path, got=error) from error


def read_text(path: Path) -> str:
    """Text of a file that may be gzipped.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    file = source_file(path, "text-gzip" if path.suffix == ".gz" else "text")
    text: str = whole_records(file, RecordFields(("text",)))[0]
    return text


def text_of(record: Row, field: str, *, where: object) -> str:
    """A field that must be text.

    Raises:
        DataError: It is missing, or something else.
    """
    found = record.get(field)
    if not isinstance(found, str):
        raise DataError(
            f"a record has no text in {field}",
            where=where,
            got=f"the fields {', '.join(map(str, record))}",
            fix="give the file in its published format",
        )
    return found

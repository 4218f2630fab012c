"""Rows of a local data file, whatever format it was published in; pyarrow for Parquet alone."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import DataError
from megatron_ext.extras import needed_packages

Row = dict[str, Any]


def read_records(path: Path) -> list[Row]:
    """The records of a JSON Lines, JSON or Parquet file, the first two gzipped or not.

    Raises:
        DataError: It cannot be read, holds no records, or is of another format.
        MissingDependencyError: It is Parquet, and pyarrow is missing.
    """
    read = _READERS.get(_suffix(path))
    if not path.is_file():
        raise DataError(
            "this is a folder" if path.is_dir() else "there is no such file or folder",
            where=path,
            expected="a data file, or a folder of them where a task says so",
            fix="correct the path",
        )
    if read is None:
        raise DataError(
            "this is no data file by its suffix",
            where=path,
            got=path.suffix or "no suffix",
            expected=f"one of {', '.join(_READERS)}, .csv where a task says so",
        )
    records = read(path)
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
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError("the data file cannot be read", where=path, got=error) from error


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


def _json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            rows.append(_json(line, f"{path}:{number}"))
    return rows


def _json_list(path: Path) -> list[Row]:
    text = read_text(path)
    if text.lstrip()[:1] != "[":
        # Many call files of lines so.
        return _json_lines(path)
    rows: list[Row] = _json(text, path)
    return rows


def _json(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError("this is no JSON", where=where, got=error) from error


def _parquet(path: Path) -> list[Row]:
    with needed_packages("Parquet"):
        from pyarrow import ArrowException, parquet
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise DataError("the data file cannot be read", where=path, got=error) from error
    return rows


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


_READERS: Final[dict[str, Callable[[Path], list[Row]]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
}

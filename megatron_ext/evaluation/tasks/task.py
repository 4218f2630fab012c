"""What a task is: it reads its files, asks a model, and says what it found.

Rows of a local data file of a task, whatever format it was published in.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.documents.record_fields import AS_THEY_ARE, RecordFields
from megatron_ext.documents.records import whole_records
from megatron_ext.documents.source_file import source_file, source_kind
from megatron_ext.errors import DataError
from megatron_ext.evaluation.language_model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What the user says of a task."""

    data: Path | None
    """File or folder with the items; None only for tasks that have their own."""

    num_fewshot: int | None = None
    """Solved examples before each item; the task's own number when not given."""

    few_shot_data: Path | None = None
    """Where these are taken from, the first ones."""

    limit: int | None = None
    """Items at most, the first ones; all when not given."""

    max_new_tokens: int | None = None
    """Of completions; the task's own number when not given."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    text_field: str = "text"
    """Field with the text of a record, for bits per byte."""

    run_generated_code: bool = False
    """Whether code that the model wrote may run."""

    without_namespaces: bool = False
    """Run it where the kernel gives no namespaces, too."""

    @property
    def path(self) -> Path:
        """``data`` of a task that needs it, which is checked where it is made."""
        assert self.data is not None
        return self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What was measured."""

    metrics: Mapping[str, float]
    count: int
    """Items."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the numbers depend on besides model and data."""

    samples: Sequence[Mapping[str, Any]] = ()
    """Each item: what was asked, what came, whether it was right."""


class Task(Protocol):
    """Its files are read when it is made, before a model is."""

    def run(self, model: LanguageModel) -> TaskResult:
        """Ask the model; every rank does the same."""


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def first_of(found: Sequence[Any], limit: int | None, *, where: object) -> list[Any]:
    """The first items.

    Raises:
        DataError: There are none.
    """
    items = list(found[:limit])
    if not items:
        raise DataError("there is nothing to evaluate on", where=where)
    return items


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

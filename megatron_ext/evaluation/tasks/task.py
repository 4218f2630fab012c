"""Tasks: their protocol, options, results and data files; and the simplest, bits per byte."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from megatron_ext.documents.record_fields import AS_THEY_ARE, RecordFields
from megatron_ext.documents.records import whole_records
from megatron_ext.documents.source_file import source_file, source_kind
from megatron_ext.errors import DataError
from megatron_ext.evaluation.language_model import (
    GenerationOptions,
    LanguageModel,
    rolling_requests,
)
from megatron_ext.registry import with_near_path


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Options of a task that the user sets."""

    data: Path | None
    """File or folder with the items; None only for tasks with data of their own."""

    num_fewshot: int | None = None
    """Solved examples before each item; the task's own number when not given."""

    few_shot_data: Path | None = None
    """File or folder of the solved examples, of which the first are taken."""

    limit: int | None = None
    """Most items, the first ones; all when not given."""

    max_new_tokens: int | None = None
    """Most tokens of a completion; the task's own number when not given."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    text_field: str = "text"
    """Field with the text of a record, for bits per byte."""

    run_generated_code: bool = False
    """Whether code that the model writes may run."""

    without_namespaces: bool = False
    """Whether it may run without kernel namespaces."""

    @property
    def path(self) -> Path:
        """``data`` of a task that needs it; its presence is checked with the flags."""
        assert self.data is not None
        return self.data

    def generation(self, *, max_new_tokens: int, stop: tuple[str, ...]) -> GenerationOptions:
        """Settings of completions, for a task with a number of new tokens of its own."""
        return GenerationOptions(
            max_new_tokens=self.max_new_tokens or max_new_tokens,
            stop=stop,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Result of a task."""

    metrics: Mapping[str, float]
    count: int
    """Number of items."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the metrics depend on, besides model and data."""

    samples: Sequence[Mapping[str, Any]] = ()
    """Question, answer and score of each item."""


class Task(Protocol):
    """A task, whose files are read when it is made, before a model is built."""

    def run(self, model: LanguageModel) -> TaskResult:
        """Measure the model; every rank makes the same calls."""


def settings_of(generation: GenerationOptions) -> dict[str, Any]:
    """What a result says of its completions."""
    names = ("max_new_tokens", "temperature", "top_p", "seed")
    return {name: getattr(generation, name) for name in names}


def mean(values: Sequence[float]) -> float:
    """Mean of at least one value."""
    return sum(values) / len(values)


def first_of(items: Sequence[Any], limit: int | None, *, where: object) -> list[Any]:
    """The first ``limit`` items.

    Raises:
        DataError: There are none.
    """
    items = list(items[:limit])
    if not items:
        raise DataError("there is nothing to evaluate on", where=where)
    return items


Row = dict[str, Any]
_MOST_SHOWN: Final = 80
_PUBLISHED: Final = "give the file in its published format"


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
            fix=with_near_path("correct the path", path),
        )
    if kind in ("text", "text-gzip"):
        raise DataError(
            "the suffix is not that of a data file",
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
        raise DataError("the file is not valid CSV", where=path, got=error) from error


def read_text(path: Path) -> str:
    """Text of a file, which may be gzipped.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    file = source_file(path, "text-gzip" if path.suffix == ".gz" else "text")
    text: str = whole_records(file, RecordFields(("text",)))[0]
    return text


def text_of(record: Row, field: str, *, where: object, fix: str = _PUBLISHED) -> str:
    """The text in a field of a record.

    Args:
        fix: Advice in the error.

    Raises:
        DataError: The field is missing, or is not text.
    """
    text = record.get(field)
    if not isinstance(text, str):
        raise DataError(
            f"a record has no text in {field}",
            where=where,
            got=f"{field} {text!r}"[:_MOST_SHOWN]
            if field in record
            else f"the fields {', '.join(map(str, record))}",
            fix=fix,
        )
    return text


class BitsPerByte:
    """Bits per byte of texts: ``sum(-log2 p(token)) / bytes``, over all tokens and UTF-8 bytes.

    A ``.txt`` file is one text; other files have one in each record. The number does not depend on
    the tokenizer, so that models compare.

    Raises:
        DataError: The texts cannot be read.
    """

    def __init__(self, options: TaskOptions) -> None:
        path = options.path
        texts = [text for text in texts_of(path, options.text_field) if text]
        self._texts: list[str] = first_of(texts, options.limit, where=path)

    def run(self, model: LanguageModel) -> TaskResult:
        """Score all windows of all texts."""
        windows = [list(rolling_requests(text, model)) for text in self._texts]
        scores = iter(model.log_likelihoods([window for of in windows for window in of]))
        nats = [-sum(next(scores).nats for _ in of) for of in windows]
        sizes = [len(text.encode("utf-8")) for text in self._texts]
        tokens = sum(len(window.continuation) for of in windows for window in of)
        return TaskResult(
            metrics={
                "bits_per_byte": sum(nats) / math.log(2) / sum(sizes),
                "nats_per_token": sum(nats) / tokens,
                "bytes_per_token": sum(sizes) / tokens,
            },
            count=len(self._texts),
            settings={"window": model.max_length},
            samples=[
                {"bytes": size, "bits_per_byte": of / math.log(2) / size}
                for size, of in zip(sizes, nats, strict=True)
            ],
        )


def texts_of(path: Path, field: str) -> list[str]:
    """The texts in a field of a file's records; a ``.txt`` file is one text.

    Raises:
        DataError: The file cannot be read, or a record has no such text.
    """
    if path.suffix == ".txt" or path.name.endswith(".txt.gz"):
        return [read_text(path)]
    fix = f"set --text-field to the field that holds the text, or name that {field!r}"
    return [
        text_of(record, field, where=f"{path}, record {number}", fix=fix)
        for number, record in enumerate(read_records(path), 1)
    ]

"""Documents of JSON lines files as one array of ids, as Megatron's fast preprocessing has it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.extras import needed_packages
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray


def tokenized_files(
    encode: Callable[[Sequence[str]], tuple[IdArray, ByteEnds]],
    paths: Sequence[str | os.PathLike[str]],
    field: str,
) -> Any:
    """An ``awkward`` array with the ids of each document, in the order of files and lines.

    Every document is held at once; ``megatron-ext tokenize`` writes indexed datasets from files of
    any size.

    Args:
        encode: Flat ids and offsets of many texts.
        paths: JSON lines files; blank lines are skipped.
        field: Key of a document's text.

    Raises:
        TokenizerError: A file cannot be read, or a line holds no text under ``field``.
        MissingDependencyError: awkward is not installed.
    """
    with needed_packages("an array of documents"):
        awkward = import_module("awkward")
    texts = [text for path in paths for text in _texts(Path(path), field)]
    ids, offsets = encode(texts)
    return awkward.Array(
        awkward.contents.ListOffsetArray(
            awkward.index.Index64(offsets), awkward.contents.NumpyArray(ids)
        )
    )


def _texts(file: Path, field: str) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text(line, field, f"{file}:{number}")
    except OSError as error:
        raise TokenizerError("cannot read the file", got=error.strerror, where=file) from error
    except UnicodeDecodeError as error:
        raise TokenizerError("the file is not UTF-8", got=error.reason, where=file) from error


def _text(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TokenizerError("the line is not JSON", got=str(error), where=where) from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise TokenizerError(
            "the line has no such text", got=keys, expected=f"text under {field!r}", where=where
        )
    return text

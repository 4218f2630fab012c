"""Documents from text files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.errors import DataError

_SURROGATE = re.compile("[\ud800-\udfff]")


def read_documents(paths: Sequence[str], *, text_key: str = "text") -> list[str]:
    """Every non-empty document, in the order of the files.

    A ``.jsonl`` file holds one JSON object a line, its text under ``text_key``; any other file is
    one document.

    Raises:
        DataError: A file is missing or not UTF-8, a line is not a JSON object with a text (with
            file and line), or no file holds any text.
    """
    documents = [
        document
        for path in map(Path, paths)
        for document in (_json_lines(path, text_key) if path.suffix == ".jsonl" else [_text(path)])
        if document
    ]
    if not documents:
        raise DataError(
            "the corpus holds no text",
            got=f"{len(paths)} empty file{'s' if len(paths) != 1 else ''}: {', '.join(paths)}",
            fix="check data.train and data.validation",
        )
    return documents


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError("the corpus cannot be read", where=path, got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise DataError(
            "the corpus is not UTF-8",
            where=path,
            got=f"{error.reason} at byte {error.start}",
        ) from error


def _json_lines(path: Path, text_key: str) -> Iterator[str]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError("the line is not JSON", where=where, got=error) from error
        if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
            keys = list(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"the line has no text under {text_key!r}",
                where=where,
                got=f"keys {keys}" if isinstance(record, dict) else keys,
                fix="set data.text_key to the field that holds the text",
            )
        text: str = record[text_key]
        # JSON can spell half of a surrogate pair, which no tokenizer takes.
        if not text.isascii() and _SURROGATE.search(text):
            raise DataError(
                "the text holds half of a surrogate pair, which UTF-8 cannot",
                where=where,
                fix='clean it: text.encode("utf-8", "replace").decode()',
            )
        yield text

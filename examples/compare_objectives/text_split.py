"""The text of a comparison, split for teacher, student and measurement."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.errors import DataError
from megatron_ext.files import write_text

HELD_OUT = 80
STUDENT_SHARE = 1 / 8
PER_DOCUMENT = 20


def write_split(sources: Sequence[Path], keys: Sequence[str], folder: Path) -> None:
    """Write ``train``, ``student`` (a part of ``train``) and ``validation`` JSONL files.

    Lines of a source are short, and windows end with their document; so several of them make one
    document.

    Args:
        sources: JSON lines, or plain text, whose paragraphs are taken for lines. Paragraphs end
            with an empty line, or with a line where there is no empty one.
        keys: Fields of a line that are its text, put together by line breaks.
        folder: Where to write.

    Raises:
        DataError: There are not enough lines, or one of them lacks a field.
    """
    texts = [text for source in sources for text in _texts(source, keys)]
    random.Random(0).shuffle(texts)
    validation, train = texts[:HELD_OUT], texts[HELD_OUT:]
    student = train[: int(len(train) * STUDENT_SHARE)]
    if not student:
        raise DataError(
            "too little text to split", got=f"{len(texts)} lines", where=str(sources[0])
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("student", student), ("validation", validation)):
        lines = (
            json.dumps({"text": "\n\n".join(part[i : i + PER_DOCUMENT])}, ensure_ascii=False) + "\n"
            for i in range(0, len(part), PER_DOCUMENT)
        )
        write_text(folder / f"{name}.jsonl", "".join(lines))


def _texts(source: Path, keys: Sequence[str]) -> list[str]:
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".jsonl":
        return [_text(line, keys, source) for line in text.splitlines()]
    paragraphs = text.split("\n\n" if "\n\n" in text else "\n")
    return [paragraph for paragraph in paragraphs if paragraph.strip()]


def _text(line: str, keys: Sequence[str], source: Path) -> str:
    row = json.loads(line)
    missing = [key for key in keys if key not in row]
    if missing:
        raise DataError(
            "a line lacks a field of its text",
            got=", ".join(row),
            expected=", ".join(keys),
            fix="name the fields with --text-keys",
            where=str(source),
        )
    return "\n".join(str(row[key]) for key in keys)

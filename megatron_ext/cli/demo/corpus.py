"""The text of the demo: the standard library's own documentation, split for teacher and student."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

from megatron_ext.files import write_text

VALIDATION_SHARE = 1 / 10
STUDENT_SHARE = 1 / 12
SHORT_PARAGRAPH = 40


def write_corpus(folder: Path) -> None:
    """Write ``train``, ``student`` (a part of ``train``) and ``validation`` JSONL files."""
    documents = _without_repeats([topics[name] for name in sorted(topics)])
    random.Random(0).shuffle(documents)
    validation, train = _take(documents, VALIDATION_SHARE)
    student, _ = _take(train, STUDENT_SHARE)
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("train", train), ("student", student), ("validation", validation)):
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        write_text(folder / f"{name}.jsonl", "".join(lines))


def _without_repeats(documents: list[str]) -> list[str]:
    """Topics quote one another; a paragraph stays only where it stands first.

    Otherwise the held-out text would hold paragraphs of the training text.
    """
    seen: set[str] = set()
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in document.split("\n\n"):
            key = paragraph.strip()
            if len(key) > SHORT_PARAGRAPH and key in seen:
                continue
            seen.add(key)
            paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs).strip()
        if len(text) > SHORT_PARAGRAPH:
            kept.append(text)
    return kept


def _take(documents: list[str], share: float) -> tuple[list[str], list[str]]:
    """Documents up to ``share`` of all characters, each at most a third of it, and the rest."""
    budget = share * sum(map(len, documents))
    taken: list[str] = []
    rest: list[str] = []
    for document in documents:
        if len(document) <= budget / 3 and sum(map(len, taken)) + len(document) <= budget:
            taken.append(document)
        else:
            rest.append(document)
    return taken, rest

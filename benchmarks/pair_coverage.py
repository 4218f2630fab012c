"""How the tokens of published pairs meet on published text, in many scripts.

    export MEGATRON_EXT_SHARED=...
    python benchmarks/pair_coverage.py --output benchmarks/results/coverage.json

For each pair and text: the share of chunks that are one token on both sides, the share of the bytes
in them, and tokens of each side a chunk. A text is one kind: word problems (GSM8K), Python code, a
Japanese novel (Wagahai wa Neko de aru), and Django's messages in several languages. Nothing is
timed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext import MegatronTokenizer, MegatronTokenizerText, TokenAligner
from megatron_ext.alignment import ChunkClass

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED", "../shared"))
PAIRS = (
    ("llama3_2", "qwen3"),
    ("llama3_2", "gemma3"),
    ("qwen3", "gemma3"),
    ("llama2_sp", "llama3_2"),
    ("gpt2", "mistral_nemo"),
)
LANGUAGES = {
    "de": "German",
    "ru": "Russian",
    "ar": "Arabic",
    "hi": "Hindi",
    "th": "Thai",
    "zh_Hans": "Chinese",
}
DOCUMENTS = 400
MESSAGE = re.compile(r'^msgstr(?:\[\d\])? ((?:"(?:[^"\\]|\\.)*"\s*)+)', re.MULTILINE)
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def texts() -> Iterator[tuple[str, list[str]]]:
    """Name and documents of each text."""
    corpora = SHARED / "corpora"
    lines = (corpora / "gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()
    records = map(json.loads, islice(lines, DOCUMENTS))
    yield "word problems", [f"{record['question']}\n{record['answer']}" for record in records]
    code = sorted((corpora / "python_code").glob("*.py.txt"))
    yield "Python code", [path.read_text(encoding="utf-8") for path in code[:DOCUMENTS]]
    novel = "".join(
        p.read_text(encoding="utf-8") for p in sorted((corpora / "wagahai").glob("*.txt"))
    )
    yield "Japanese prose", novel[:200_000].split("\n")
    for language, name in LANGUAGES.items():
        files = sorted((corpora / "django_po").glob(f"{language}.*.po"))
        yield name, [m for path in files for m in _messages(path.read_text(encoding="utf-8"))]


def _messages(page: str) -> Iterator[str]:
    for found in MESSAGE.finditer(page):
        text = "".join(ast.literal_eval(string) for string in STRING.findall(found[1]))
        if text:
            yield text


def row(aligner: TokenAligner, documents: list[str]) -> dict[str, Any]:
    """What a pair makes of one text."""
    chunks = one_to_one = bytes_in_them = student_tokens = teacher_tokens = 0
    for student, teacher, alignment in aligner.align_each(documents):
        is_one = alignment.chunk_class == ChunkClass.ONE_TO_ONE
        firsts, lasts = alignment.student_spans.T
        ends = np.concatenate([[0], student.ends])
        chunks += alignment.chunk_count
        one_to_one += int(is_one.sum())
        bytes_in_them += int((ends[lasts] - ends[firsts])[is_one].sum())
        student_tokens += len(student.ids)
        teacher_tokens += len(teacher.ids)
    return {
        "documents": len(documents),
        "bytes": sum(len(document.encode()) for document in documents),
        "chunks": chunks,
        "one_to_one": one_to_one,
        "bytes_in_one_to_one": bytes_in_them,
        "student_tokens": student_tokens,
        "teacher_tokens": teacher_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    output = parser.parse_args().output
    loaded: dict[str, MegatronTokenizerText] = {
        name: MegatronTokenizer.from_pretrained(SHARED / "tokenizers" / name)
        for name in sorted({name for pair in PAIRS for name in pair})
    }
    rows = []
    for student, teacher in PAIRS:
        aligner = TokenAligner(loaded[student], loaded[teacher])
        for name, documents in texts():
            rows.append({"student": student, "teacher": teacher, "text": name})
            rows[-1] |= row(aligner, documents)
            share = rows[-1]["one_to_one"] / rows[-1]["chunks"]
            print(f"{student:>10} {teacher:>14} {name:>16} {share:>8.1%}", flush=True)
    if output is not None:
        output.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

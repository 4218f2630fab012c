"""How long an alignment takes, from byte ends to chunk ids, on one thread.

    python benchmarks/alignment.py --output benchmarks/results/alignment.json

Student Tekken (131,072 ids), teacher SentencePiece v3 (32,768 ids), both from mistral_common. Three
texts: source code with its comments, one sentence over and over, and a short document padded with
control tokens. Tokenizing is not in the times.

Each time is of one whole call, check of the ends and fresh result arrays included; the result of
the call before has been freed. ``ms_min``, ``ms_median`` and ``ms_max`` are by the clock on the
wall, ``ms_cpu_median`` is what the thread itself ran, which a busy machine stretches less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import mistral_common
import numpy as np

from megatron_ext.alignment import align_byte_ends
from megatron_ext.alignment.byte_alignment import ByteEnds
from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.libraries.sentencepiece import SentencePieceTokenizer
from megatron_ext.tokenizers.libraries.tiktoken import TiktokenTokenizer

DATA = Path(mistral_common.__file__).parent / "data"
SIZES = (4_096, 16_384, 65_536, 262_144, 1_000_000)
SHORT_DOCUMENT = 320
SENTENCE = "人工智能 learns 2017 tokens again, и снова。\n"

Ends = tuple[ByteEnds, ByteEnds]


def demo_pair() -> tuple[MegatronTokenizerTextAbstract, MegatronTokenizerTextAbstract]:
    """Student and teacher."""
    return (
        TiktokenTokenizer(DATA / "tekken_240911.json"),
        SentencePieceTokenizer(DATA / "mistral_instruct_tokenizer_240323.model.v3"),
    )


def source_code() -> Iterator[str]:
    """Files of the standard library, in the order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-e]*/*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def byte_ends(
    pair: tuple[MegatronTokenizerTextAbstract, ...], documents: Iterator[str], token_count: int
) -> Ends:
    """Ends of ``token_count`` student tokens, and of the teacher's up to the same byte."""
    sides: list[list[ByteEnds]] = [[], []]
    start = tokens = 0
    while tokens < token_count:
        document = next(documents)
        for side, tokenizer in zip(sides, pair, strict=True):
            side.append(tokenizer.encode_with_byte_ends(document)[1] + start)
        start += len(document.encode())
        tokens += len(sides[0][-1])
    student, teacher = (np.concatenate(side) for side in sides)
    student = student[:token_count]
    return student, teacher[: np.searchsorted(teacher, student[-1], side="right")]


def padded(ends: Ends, token_count: int) -> Ends:
    """A short document and, behind it, tokens that cover nothing."""
    student, teacher = (
        np.append(side, np.full(max(token_count - len(side), 0), side[-1])) for side in ends
    )
    return student, teacher


def measure(call: Callable[[], object], repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each call, by the wall and of the thread, after one that is not counted."""
    call()
    wall, cpu = [], []
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), time.thread_time()
        call()
        cpu.append((time.thread_time() - cpu_start) * 1e3)
        wall.append((time.perf_counter() - wall_start) * 1e3)
    return wall, cpu


def rows() -> Iterator[dict[str, Any]]:
    """One row for each text and size."""
    pair = demo_pair()
    longest = {
        "source code": byte_ends(pair, source_code(), SIZES[-1]),
        "repetitive": byte_ends(pair, repeat(SENTENCE * 100), SIZES[-1]),
    }
    short = byte_ends(pair, source_code(), SHORT_DOCUMENT)
    for size in SIZES:
        for text, (student, teacher) in longest.items():
            student_part = student[:size]
            stop = np.searchsorted(teacher, student_part[-1], side="right")
            yield row(text, student_part, teacher[:stop])
        yield row(f"{SHORT_DOCUMENT} tokens, padded", *padded(short, size))


def row(text: str, student: ByteEnds, teacher: ByteEnds) -> dict[str, Any]:
    repeats = max(10, min(300, 20_000_000 // len(student)))
    wall, cpu = measure(lambda: align_byte_ends(student, teacher), repeats)
    median = float(np.median(wall))
    return {
        "text": text,
        "student_tokens": len(student),
        "teacher_tokens": len(teacher),
        "bytes": int(student[-1]),
        "chunks": align_byte_ends(student, teacher).chunk_count,
        "repeats": repeats,
        "ms_min": min(wall),
        "ms_median": median,
        "ms_max": max(wall),
        "ms_cpu_median": float(np.median(cpu)),
        "ns_per_student_token": median / len(student) * 1e6,
        "student_tokens_per_second": len(student) / median * 1e3,
    }


def machine() -> dict[str, Any]:
    """What the times were measured on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def write_results(path: Path | None, result_rows: list[dict[str, Any]]) -> None:
    """Machine and rows as JSON."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "rows": result_rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    output = parser.parse_args().output
    columns = ("student", "teacher", "ms min", "median", "max", "cpu", "ns/token")
    print(f"{'text':>20}", *(f"{column:>9}" for column in columns))
    results = []
    for result in rows():
        results.append(result)
        print(
            f"{result['text']:>20} {result['student_tokens']:>9,} {result['teacher_tokens']:>9,}"
            f" {result['ms_min']:>9.3f} {result['ms_median']:>9.3f} {result['ms_max']:>9.3f}"
            f" {result['ms_cpu_median']:>9.3f} {result['ns_per_student_token']:>9.1f}",
            flush=True,
        )
    write_results(output, results)


if __name__ == "__main__":
    main()

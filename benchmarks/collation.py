"""How long a batch of 64 rows of 2,048 tokens takes, from texts to tensors, on one thread.

    python benchmarks/collation.py --output benchmarks/results/collation.json

Student Tekken (131,072 ids), teacher SentencePiece v3 (32,768 ids), both from mistral_common, with
the fast engine; ``--student`` and ``--teacher`` take other files. Texts are the sources of Python's
standard library, cut into pieces that fill a row each, and the same cut into eight for each row, to
be packed.

``first`` tokenizes and aligns, ``second`` finds both in the cache. The stages of the first are
measured by themselves. Times are what the thread ran, in milliseconds, the best of many after one
batch that is not counted.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.alignment import DATA, machine, source_code
from megatron_ext.alignment import align_byte_ends
from megatron_ext.alignment.text_tokens import TextTokenizer
from megatron_ext.data.aligner import AlignedText, PackedSample
from megatron_ext.data.collator import CrossTokenizerCollator, TeacherCTSpec
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer

ROWS, LENGTH = 64, 2_048
TEACHER_LENGTH = 4_096
REPEATS = 25


def texts_of(tokenizer: MegatronTokenizerText, count: int, tokens: int) -> list[str]:
    """``count`` stretches of source code of about ``tokens`` tokens each."""
    texts: list[str] = []
    for document in source_code():
        _, ends = tokenizer.encode_with_byte_ends(document)
        raw = document.encode()
        bounds = [0, *ends[tokens - 1 :: tokens].tolist()]
        texts += [raw[a:b].decode(errors="ignore") for a, b in pairwise(bounds)]
        if len(texts) >= count:
            return texts[:count]
    raise ValueError(
        f"the standard library has no {count} stretches in {sysconfig.get_path('stdlib')}"
    )


def best_ms(call: Callable[[], object]) -> float:
    """What the thread ran in one call, the best of many: others share the machine's caches."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        times.append((time.thread_time() - start) * 1e3)
    return min(times)


def samples(texts: Sequence[AlignedText], per_row: int) -> list[PackedSample]:
    """Rows of ``per_row`` texts each."""
    return [
        PackedSample(tuple(texts[start : start + per_row]))
        for start in range(0, len(texts), per_row)
    ]


def row(student: MegatronTokenizerText, teacher: MegatronTokenizerText, per_row: int) -> Any:
    """The times of one kind of batch."""
    spec = TeacherCTSpec(name="teacher", tokenizer=teacher, max_length=TEACHER_LENGTH)
    texts = texts_of(student, ROWS * per_row, (LENGTH - 8 * per_row) // per_row)
    raws = [text.encode() for text in texts]
    collator = CrossTokenizerCollator(student, LENGTH, [spec])
    collator.prepare()
    sides = [TextTokenizer(student), TextTokenizer(teacher)]
    ends = [side.encode(texts, raws).ends for side in sides]
    packed = samples(collator.aligner.align(texts), per_row)
    with tempfile.TemporaryDirectory() as folder:
        cached = CrossTokenizerCollator(student, LENGTH, [spec], cache_dir=folder)
        cached.aligner.align(texts)
        size = sum(file.stat().st_size for file in Path(folder).glob("*/*"))
        second = best_ms(lambda: cached(samples(cached.aligner.align(texts), per_row)))
        from_cache = best_ms(lambda: cached.aligner.align(texts))
    return {
        "texts": len(texts),
        "texts_per_row": per_row,
        "bytes": sum(map(len, raws)),
        "student_tokens": len(ends[0]),
        "teacher_tokens": len(ends[1]),
        "cache_bytes": size,
        "first_ms": best_ms(lambda: collator(samples(collator.aligner.align(texts), per_row))),
        "second_ms": second,
        "tokenize_student_ms": best_ms(lambda: student.text_to_flat_ids(texts)),
        "tokenize_teacher_ms": best_ms(lambda: teacher.text_to_flat_ids(texts)),
        "with_byte_ends_student_ms": best_ms(lambda: sides[0].encode(texts, raws)),
        "with_byte_ends_teacher_ms": best_ms(lambda: sides[1].encode(texts, raws)),
        "align_ms": best_ms(lambda: align_byte_ends(*ends)),
        "tokenize_and_align_ms": best_ms(lambda: collator.aligner.align(texts)),
        "from_cache_ms": from_cache,
        "tensors_ms": best_ms(lambda: collator(packed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student", default=str(DATA / "tekken_240911.json"))
    parser.add_argument(
        "--teacher", default=str(DATA / "mistral_instruct_tokenizer_240323.model.v3")
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    student, teacher = (
        build_tokenizer(TokenizerConfig(model=model))
        for model in (arguments.student, arguments.teacher)
    )
    rows = [row(student, teacher, per_row) for per_row in (1, 8)]
    names = [Path(model).name for model in (arguments.student, arguments.teacher)]
    result = {"machine": machine(), "student": names[0], "teacher": names[1], "rows": rows}
    print(json.dumps(result, indent=1))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

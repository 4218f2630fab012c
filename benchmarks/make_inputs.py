"""Write the vocabulary pairs that the benchmark of losses reads, where it has no tokenizers.

    MEGATRON_EXT_SHARED=... python benchmarks/make_inputs.py

Takes tokenizers and texts from the folder of published vocabularies (``tokenizers/llama3_2``,
``qwen3`` and ``gemma3``; ``corpora/gsm8k`` and ``python_code``) and writes into
``benchmarks/inputs``: for each pair its projection, the bytes of both vocabularies' tokens, and a
text of 16,384 student tokens with its chunks, alternately a record of GSM8K and a piece of Python
of the same length. About 4 MB a pair; without them the benchmark makes up pairs of the same
structure and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from loss_cost.pairs import INPUTS, SIZES, Pair

from megatron_ext.alignment import TokenAligner
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer
from megatron_ext.tokenizers.token_bytes import TokenBytes

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED", Path(__file__).parents[2] / "shared"))
TEACHERS = {"Llama 3.2 x Qwen 3": "qwen3", "Llama 3.2 x Gemma 3": "gemma3"}
TOKENS = 16_384
DOCUMENT_CHARACTERS = 600


def documents() -> Iterator[str]:
    """A record of GSM8K and a piece of Python in turn."""
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted((SHARED / "corpora" / "python_code").glob("*.txt"))
    )
    pieces = iter(
        textwrap.wrap(
            code,
            DOCUMENT_CHARACTERS,
            replace_whitespace=False,
            drop_whitespace=False,
            expand_tabs=False,
        )
    )
    for line in (SHARED / "corpora" / "gsm8k" / "train.jsonl").open(encoding="utf-8"):
        record = json.loads(line)
        yield f"{record['question']}\n{record['answer']}\n"
        yield next(pieces)


def make_pair(name: str) -> Pair:
    """Build projection and text of one pair."""
    folder = SHARED / "tokenizers"
    student = HuggingFaceTokenizer(folder / "llama3_2")
    teacher = HuggingFaceTokenizer(folder / TEACHERS[name])
    assert (student.vocab_size, teacher.vocab_size) == SIZES[name]
    aligner = TokenAligner(student, teacher)
    ids: list[list[np.ndarray]] = [[], []]
    chunks: list[list[np.ndarray]] = [[], []]
    first = tokens = 0
    for document in documents():
        (aligned,) = aligner.align_each([document])
        alignment = aligned.alignment
        for side, (encoded, chunk) in enumerate(
            (
                (aligned.student, alignment.student_chunk_id),
                (aligned.teacher, alignment.teacher_chunk_id),
            )
        ):
            ids[side].append(np.asarray(encoded.ids, dtype=np.int64))
            chunks[side].append(np.where(chunk >= 0, chunk.astype(np.int64) + first, -1))
        first += alignment.chunk_count
        tokens += len(ids[0][-1])
        if tokens >= TOKENS:
            break
    rows = [TokenBytes.of(tokenizer) for tokenizer in (student, teacher)]
    spellings = [
        [None if control else row for row, control in zip(side.rows, side.is_control, strict=True)]
        for side in rows
    ]
    return Pair(
        name=name,
        source="published",
        projection=SparseProjection.from_tokenizers(student, teacher),
        student_tokens=spellings[0],
        teacher_tokens=spellings[1],
        student_ids=np.concatenate(ids[0]),
        teacher_ids=np.concatenate(ids[1]),
        student_chunk=np.concatenate(chunks[0]),
        teacher_chunk=np.concatenate(chunks[1]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=INPUTS, help="where to write")
    folder = parser.parse_args().folder
    for name in TEACHERS:
        pair = make_pair(name)
        pair.save(folder)
        chunks = 1 + int(pair.student_chunk.max())
        print(
            f"{name}: {len(pair.projection.values):,} entries, {len(pair.student_ids):,} student"
            f" and {len(pair.teacher_ids):,} teacher tokens in {chunks:,} chunks"
        )


if __name__ == "__main__":
    main()

"""Collators for the real vocabularies that mistral-common carries, and a corpus for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ext import ArrowTextDataset, CrossTokenizerCollator, TeacherCTSpec
from megatron_ext.training.cross_tokenizer.packed_dataset import PackedTextDataset
from tests.training.tiny_run import SENTENCES
from tests.training.tokenizer_pair import student_tokenizer, teacher_tokenizer

TEXTS = [
    *("".join(SENTENCES[(i + k) % 5] for k in range(1 + i % 4)) for i in range(20)),
    " ",
    "人工智能 learns 2017 tokens.\n" * 12,
    "é\N{COMBINING ACUTE ACCENT}👩‍👩‍👧 \N{RIGHT-TO-LEFT MARK}שלום\0",
]


def collator(student_length: int = 64, teacher_length: int = 80, **options: Any) -> Any:
    """Tekken as the student's; teachers with SentencePiece, with Tekken, and with its own."""
    return CrossTokenizerCollator(
        student_tokenizer(),
        student_length,
        [
            TeacherCTSpec(name="sp", tokenizer=teacher_tokenizer(), max_length=teacher_length),
            TeacherCTSpec(name="same", tokenizer=student_tokenizer()),
            TeacherCTSpec(name="own", weight=0.5),
        ],
        **options,
    )


def write_corpus(folder: Path) -> Path:
    """``TEXTS`` as JSON lines."""
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def packed(folder: Path, reader: Any = None, **options: Any) -> PackedTextDataset:
    """``TEXTS`` in small blocks."""
    settings = {"block_bytes": 900, "run_documents": 2} | options
    return PackedTextDataset(
        ArrowTextDataset(write_corpus(folder)), reader or collator(), **settings
    )

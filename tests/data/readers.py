"""Collators for the real vocabularies that mistral-common carries, and a corpus for them."""

import json
from functools import cache

from megatron_ext import ArrowTextDataset, CrossTokenizerCollator, TeacherCTSpec
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from tests.training.tiny_run import SENTENCES, vocabulary

TEXTS = [
    *("".join(SENTENCES[(i + k) % 5] for k in range(1 + i % 4)) for i in range(20)),
    " ",
    "".join(f"人工智能 learns {number} tokens.\n" for number in range(2017, 2040)),
    "é\N{COMBINING ACUTE ACCENT}👩‍👩‍👧 \N{RIGHT-TO-LEFT MARK}שלום\0",
]


# Without the fast engine, which takes seconds to build and gives the same ids.


@cache
def student_tokenizer():
    """Tekken."""
    model = vocabulary("tekken_240911.json")
    return build_tokenizer(TokenizerConfig(model=model, engine="reference"))


@cache
def teacher_tokenizer():
    """SentencePiece, which puts a space before the text."""
    model = vocabulary("mistral_instruct_tokenizer_240323.model.v3")
    return build_tokenizer(TokenizerConfig(model=model, engine="reference"))


def collator(student_length=64, teacher_length=80, **options):
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


def write_corpus(folder):
    """``TEXTS`` as JSON lines."""
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def packed(folder, reader=None, **options):
    """``TEXTS`` in small blocks."""
    settings = {"block_bytes": 900, "run_documents": 2} | options
    return PackedTextDataset(
        ArrowTextDataset(write_corpus(folder)), reader or collator(), **settings
    )


def student_ids(sample):
    """Of all pieces."""
    return [token for piece in sample.pieces for token in piece.student_ids.tolist()]

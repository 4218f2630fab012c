"""Tokenizers that change a text before they cut it: offsets into the original text align them."""

import json
import unicodedata

import numpy as np
import pytest

from megatron_ext.alignment import BridgedAlignment, TokenAligner
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers import MegatronTokenizerText
from tests.alignment.shared_text import needs_shared, published

DECOMPOSED = unicodedata.normalize("NFD", "Café Ångström naïve, déjà vu; ein Überblick.")
HINDI = "काग\u095bी क\u093cलम और फ\u093cाइल की सूची"


@pytest.fixture(scope="module")
def lower_casing(tmp_path_factory):
    """A WordPiece of a few words that composes accents and folds case."""
    words = [
        "the",
        "cafe",
        "##s",
        "ein",
        "uber",
        "##blick",
        "c",
        "##a",
        "##f",
        "##é",
        "e",
        ".",
        ",",
    ]
    vocab = {word: index for index, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {
            "type": "WordPiece",
            "vocab": vocab,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    }
    folder = tmp_path_factory.mktemp("wordpiece")
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return MegatronTokenizerText(folder, {"library": "huggingface"})


def texts_of(text, tokenizer, ids, count):
    """The original text that each chunk covers."""
    ends = tokenizer.encode_with_byte_ends(text)[1]
    begins = np.append(0, ends[:-1])
    raw = text.encode()
    return [
        b"".join(raw[begins[t] : ends[t]] for t in np.flatnonzero(ids == chunk)).decode()
        for chunk in range(count)
    ]


def test_case_and_accents_do_not_keep_words_from_aligning(tekken, lower_casing):
    text = "The CAFÉS, the Cafe\u0301."
    alignment = TokenAligner(tekken, lower_casing).align(text)
    for tokenizer, ids in (
        (tekken, alignment.student_chunk_id),
        (lower_casing, alignment.teacher_chunk_id),
    ):
        chunks = texts_of(text, tokenizer, ids, alignment.chunk_count)
        assert chunks == ["The", " CAF", "É", "S", ",", " the", " Cafe\u0301", "."]


@needs_shared
@pytest.mark.parametrize("text", [DECOMPOSED, HINDI], ids=["decomposed", "Hindi"])
@pytest.mark.parametrize("name", ["qwen3", "bert_uncased", "t5_small"])
def test_both_sides_of_a_chunk_are_the_same_original_text(tekken, name, text):
    teacher = published(name)
    if teacher.unk_id in teacher.text_to_ids(text):
        pytest.skip(f"{name} has no tokens for this text")
    alignment = TokenAligner(tekken, teacher).align(text)
    own, other = (
        texts_of(text, tokenizer, ids, alignment.chunk_count)
        for tokenizer, ids in (
            (tekken, alignment.student_chunk_id),
            (teacher, alignment.teacher_chunk_id),
        )
    )
    assert own == other
    assert "".join(own) == text
    assert alignment.chunk_count > len(text.split()) / 2


@needs_shared
@pytest.mark.parametrize("text", [DECOMPOSED, HINDI], ids=["decomposed", "Hindi"])
def test_streams_of_a_composing_tokenizer_are_refused_or_bridged(tekken, text):
    aligner = TokenAligner(tekken, published("qwen3"))
    sides = tekken.text_to_ids(text), published("qwen3").text_to_ids(text)
    with pytest.raises(AlignmentError, match="decode to different bytes"):
        aligner.align_ids(*sides)
    alignment = aligner.align_ids(*sides, bridge=True)
    assert isinstance(alignment, BridgedAlignment)
    composed = unicodedata.normalize("NFC", text)
    assert alignment.bridge.student_bytes == len(text.encode())
    assert alignment.bridge.teacher_bytes == len(composed.encode())
    changed = alignment.bridge.student_residual_bytes
    assert 0 < changed < len(text.encode()) / 2
    assert alignment.chunk_count > 3

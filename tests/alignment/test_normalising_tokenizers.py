"""Tokenizers that change a text before they cut it: offsets into the original text align them."""

import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import BridgedAlignment, ChunkClass, ChunkCounts, TokenAligner
from megatron_ext.alignment.audit import AuditDocument, PairAudit
from megatron_ext.alignment.chunk_places import BEGINS
from megatron_ext.data.aligner import TextAligner
from megatron_ext.errors import AlignmentError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import byte_of_character
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


@pytest.fixture(scope="module")
def composing(tmp_path_factory):
    """Single bytes of a text that it composes (NFC)."""
    vocab = byte_of_character()
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    folder = tmp_path_factory.mktemp("bytes")
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


def bytes_of(tokenizer, ids, chunk_id, chunk):
    return b"".join(tokenizer.token_bytes(int(i)) for i in ids[chunk_id == chunk])


CHARACTERS = [
    # Taken apart by NFC: Bengali, Devanagari, Gurmukhi, Tibetan, Hebrew, a fork, a musical note.
    *"\u09dc\u09dd\u09df\u0958\u095b\u0a33\u0f43\ufb1d\u2adc\U0001d15e",
    # Put together.
    *("e\u0301", "\u1100\u1161\u11a8", "\u09c7\u09be"),
    # Of marks in another order than the canonical one, alone and with what they are composed with.
    *("\u1004\u103a\u1037", "a\u0301\u0323", "x\u05b0\u0327\u0301", "\u0301\u0327"),
    *("\u09b8", "ab", " ", "\u00e9", "\u0bb9", "\u4e2d", "\U0001f642", "\u09bc"),
]


@settings(max_examples=80, deadline=None)
@given(text=st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=8).map("".join))
def test_what_is_made_of_one_character_is_in_its_chunk_and_exact_where_it_is_the_same(
    tekken, composing, text
):
    ids = [tokenizer.encode_with_byte_ends(text)[0] for tokenizer in (tekken, composing)]
    for first, second in ((tekken, composing), (composing, tekken), (composing, composing)):
        alignment = TokenAligner(first, second).align(text)
        sides = [
            (tokenizer, ids[tokenizer is composing], chunk_id)
            for tokenizer, chunk_id in (
                (first, alignment.student_chunk_id),
                (second, alignment.teacher_chunk_id),
            )
        ]
        # No token is left out, and chunks are contiguous.
        for _, own, chunk_id in sides:
            assert len(chunk_id) == len(own)
            assert chunk_id[0] == 0
            assert set(np.diff(chunk_id).tolist()) <= {0, 1}
        for chunk in range(alignment.chunk_count):
            own, other = (bytes_of(*side, chunk) for side in sides)
            assert bool(alignment.is_exact[chunk]) == (own == other)
            if own != other:
                # A chunk can begin within a character that nobody has changed.
                texts = [raw.decode(errors="surrogateescape") for raw in (own, other)]
                assert unicodedata.normalize("NFC", texts[0]) == texts[1] or texts[0] == (
                    unicodedata.normalize("NFC", texts[1])
                )
    # One tokenizer with itself is aligned token by token.
    assert alignment.chunk_count == len(ids[1])


@needs_shared
@pytest.mark.parametrize("text", ["\u09b8\u09ae\u09df", "\u09b8 \u09b8\u09ae\u09df \u09ac"])
def test_a_bengali_letter_and_its_nukta_are_one_chunk(text):
    student, teacher = published("llama3_2"), published("qwen3")
    aligner = TokenAligner(student, teacher)
    alignment = aligner.align(text)
    ids = teacher.text_to_ids(text)
    chunk = int(alignment.teacher_chunk_id[ids.index(teacher.text_to_ids("\u09af")[0])])
    parts = bytes_of(teacher, np.array(ids), alignment.teacher_chunk_id, chunk)
    assert parts.decode() == "\u09af\u09bc"
    assert np.flatnonzero(~alignment.is_exact).tolist() == [chunk]
    assert alignment.chunk_class[chunk] == ChunkClass.MANY_TO_MANY
    batch = aligner.align_batch([text])
    assert batch.is_exact.sum() == batch.chunk_count - 1


def test_a_run_and_the_audit_read_the_same_chunks(tekken, composing):
    texts = ["plain", "ab \u09df c", "", "ab c", "  ", "e\u0301te\u0301", "\u0301\u0327", "plain"]
    for student, teacher in ((tekken, composing), (composing, tekken), (composing, composing)):
        audit, counts = PairAudit(student, teacher), ChunkCounts()
        audit.add(AuditDocument(text, "corpus") for text in texts)
        rows = TextAligner(student, [teacher]).align(texts)
        for text, row in zip(texts, rows, strict=True):
            expected = TokenAligner(student, teacher).align(text)
            counts += ChunkCounts.of(expected)
            tokens = row.teachers[0]
            assert row.student_ids.tolist() == student.text_to_ids(text)
            assert tokens.ids.tolist() == teacher.text_to_ids(text)
            ends = student.encode_with_byte_ends(text)[1]
            assert row.student_widths.cumsum().tolist() == ends.tolist()
            for marks, chunk_id in (
                (tokens.student_marks, expected.student_chunk_id),
                (tokens.teacher_marks, expected.teacher_chunk_id),
            ):
                begins = marks >= BEGINS
                assert (np.cumsum(begins) - 1).tolist() == chunk_id.tolist()
                assert (marks[begins] == BEGINS).tolist() == expected.is_exact.tolist()
        report = audit.report()
        assert report.total.counts == counts
        assert report.total.byte_count == sum(len(text.encode()) for text in texts)
    # Both take a letter apart alike: its parts are chunks, of which one covers bytes.
    assert counts.one_to_one == counts.chunks == report.student.tokens


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

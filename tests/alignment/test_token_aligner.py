"""Alignment through real tokenizers, over any text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import TokenAligner
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError
from tests.alignment.brute_force import brute_force_chunks, chunks_of
from tests.alignment.test_invariants import texts as unusual_texts
from tests.fork_server import run_python

any_text = settings(deadline=None)
texts = st.one_of(
    unusual_texts,
    st.text(max_size=40),
    st.text(st.sampled_from(" \t\n\u00a0a1é中🙂\u200d"), max_size=40),
    st.lists(st.sampled_from(["the ", "201 ", "संस्कृत", "日本語", "Привет ", "==", "\r\n"])).map(
        "".join
    ),
)

PASSAGES = [
    "The year 2017 saw 1,048,576 bytes aligned.\n\n  def f(x):\n",
    "每个字符的字节都必须对齐，不多不少。",
    "बाइट ही एकमात्र साझा मुद्रा हैं।",
    "バイトだけが共通の通貨です。",
    "Только байты одинаковы у всех.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u0000 \ufeff",
    "",
]


@given(text=texts)
@any_text
def test_chunks_of_any_text_are_the_groups_of_tokens_that_share_bytes(aligner, text):
    ends = [
        tokenizer.encode_with_byte_ends(text)[1].tolist()
        for tokenizer in (aligner.student_tokenizer, aligner.teacher_tokenizer)
    ]
    assert chunks_of(aligner.align(text)) == brute_force_chunks(*ends)


@given(text=texts)
@any_text
def test_both_sides_of_a_chunk_spell_the_same_bytes_and_chunks_spell_the_text(aligner, text):
    alignment = aligner.align(text)
    spelled = []
    for tokenizer, spans in (
        (aligner.student_tokenizer, alignment.student_spans),
        (aligner.teacher_tokenizer, alignment.teacher_spans),
    ):
        ends = tokenizer.encode_with_byte_ends(text)[1]
        stops = ends[spans[:, 1] - 1].tolist()
        starts = [0, *stops[:-1]] if stops else []
        raw = text.encode()
        spelled.append([raw[start:stop] for start, stop in zip(starts, stops, strict=True)])
    assert spelled[0] == spelled[1]
    assert b"".join(spelled[0]) == text.encode()


@given(text=texts)
@any_text
def test_ids_align_as_the_text_that_they_came_from(aligner, text):
    # Ids of SentencePiece do not tell its mark of a space from a space.
    text = text.replace("▁", "")
    student = aligner.student_tokenizer.text_to_ids(text)
    teacher = aligner.teacher_tokenizer.text_to_ids(text)
    from_text, from_ids = aligner.align(text), aligner.align_ids(student, teacher)
    assert np.array_equal(from_ids.student_chunk_id, from_text.student_chunk_id)
    assert np.array_equal(from_ids.teacher_chunk_id, from_text.teacher_chunk_id)


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        pytest.param("a cat", "a cow", "byte 3 on; got b'at'; expected b'ow'", id="other text"),
        pytest.param("a cat", "a", "from byte 1 on; got b' cat'; expected the end", id="shorter"),
        pytest.param("", "a", "from byte 0 on; got the end after 0 bytes", id="nothing"),
    ],
)
def test_streams_of_different_bytes_are_refused(aligner, student, teacher, message):
    with pytest.raises(AlignmentError, match=message):
        aligner.align_ids(
            aligner.student_tokenizer.text_to_ids(student),
            aligner.teacher_tokenizer.text_to_ids(teacher),
        )


def test_importing_the_alignment_does_not_import_torch():
    run_python("import sys, megatron_ext.alignment; sys.exit('torch' in sys.modules)")


def test_paired_control_tokens_are_chunks_unless_that_is_switched_off(tekken, sentencepiece):
    sides = [
        [tokenizer.bos_id, *tokenizer.text_to_ids("a cat"), tokenizer.eos_id, tokenizer.eos_id]
        for tokenizer in (tekken, sentencepiece)
    ]
    sides[0].pop()
    aligned = TokenAligner(tekken, sentencepiece).align_ids(*sides)
    assert aligned.student_chunk_id.tolist() == [0, 1, 2, 3]
    assert aligned.teacher_chunk_id.tolist() == [0, 1, 2, 3, NO_CHUNK]
    plain = TokenAligner(tekken, sentencepiece, pair_control_tokens=False).align_ids(*sides)
    assert plain.student_chunk_id.tolist() == [NO_CHUNK, 0, 1, NO_CHUNK]


def test_control_tokens_of_a_batch_are_paired_within_their_text(tekken):
    class Framed:
        """Begins and ends texts with one control token, but for those that it is told."""

        def __init__(self, bare):
            self.bare = bare

        def __getattr__(self, name):
            return getattr(tekken, name)

        def text_to_flat_ids(self, texts):
            rows = [self.encode_with_byte_ends(text)[0] for text in texts]
            return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

        def encode_with_byte_ends(self, text):
            ids, ends = tekken.encode_with_byte_ends(text)
            if text == self.bare:
                return ids, ends
            eos = tekken.eos_id
            return np.array([eos, *ids, eos], np.int32), np.array([0, *ends, *ends[-1:]])

    for texts in (["a", "b", "c"], ["c", "b", "a"]):
        rows = TokenAligner(Framed(bare="a"), Framed(bare="b")).align_each(texts)
        found = {text: row.alignment for text, row in zip(texts, rows, strict=True)}
        assert found["a"].student_chunk_id.tolist() == [0]
        assert found["a"].teacher_chunk_id.tolist() == [NO_CHUNK, 0, NO_CHUNK]
        assert found["b"].student_chunk_id.tolist() == [NO_CHUNK, 0, NO_CHUNK]
        assert found["c"].student_chunk_id.tolist() == [0, 1, 2]
        assert all(alignment.is_exact.all() for alignment in found.values())


def test_given_byte_ends_align_as_the_text(aligner):
    text = "The year 2017, संस्कृत and 日本語."
    sides = [
        tokenizer.encode_with_byte_ends(text)
        for tokenizer in (aligner.student_tokenizer, aligner.teacher_tokenizer)
    ]
    from_text, given_ends = aligner.align(text), aligner.align_encoded(*sides)
    assert np.array_equal(from_text.student_chunk_id, given_ends.student_chunk_id)
    assert np.array_equal(from_text.teacher_chunk_id, given_ends.teacher_chunk_id)


@given(batch=st.lists(texts, max_size=4))
@settings(deadline=None)
def test_a_batch_of_texts_aligns_as_each_text(aligner, batch):
    rows = aligner.align_each(batch)
    assert len(rows) == len(batch)
    for text, row in zip(batch, rows, strict=True):
        for side, tokenizer in (
            (row.student, aligner.student_tokenizer),
            (row.teacher, aligner.teacher_tokenizer),
        ):
            ids, ends = tokenizer.encode_with_byte_ends(text)
            assert side.ids.tolist() == ids.tolist()
            assert side.ends.tolist() == ends.tolist()
        whole = aligner.align(text)
        assert np.array_equal(row.alignment.student_chunk_id, whole.student_chunk_id)
        assert np.array_equal(row.alignment.teacher_chunk_id, whole.teacher_chunk_id)


def test_a_batch_of_texts_and_of_their_ids_are_the_same_tensors(aligner):
    batch = PASSAGES
    lengths = {"student_length": 12, "teacher_length": 9}
    ids = [
        tuple(
            tokenizer.text_to_ids(text)
            for tokenizer in (aligner.student_tokenizer, aligner.teacher_tokenizer)
        )
        for text in batch
    ]
    from_texts, from_ids = (
        aligner.align_batch(batch, **lengths),
        aligner.align_batch(ids, **lengths),
    )
    assert from_texts.student_chunk_id.shape == (len(batch), 12)
    assert from_texts.teacher_chunk_id.shape == (len(batch), 9)
    assert from_texts.student_chunk_id.equal(from_ids.student_chunk_id)
    assert from_texts.teacher_chunk_id.equal(from_ids.teacher_chunk_id)
    for text, row in zip(batch, from_texts, strict=True):
        cut = aligner.align_each([text], **lengths)[0]
        assert len(cut.student.ids) <= 12
        assert len(cut.teacher.ids) <= 9
        # Token 0 is not predicted, and its chunk is dropped.
        in_no_label = (cut.alignment.student_spans[:1] == 0).any()
        in_no_label |= (cut.alignment.teacher_spans[:1] == 0).any()
        assert row.chunk_count == cut.alignment.chunk_count - bool(in_no_label)


def test_a_batch_without_lengths_is_as_long_as_its_longest_sample(aligner):
    batch = aligner.align_batch(["a", "a cat sat"])
    longest = len(aligner.student_tokenizer.text_to_ids("a cat sat"))
    assert batch.student_chunk_id.shape == (2, longest)
    assert aligner.align_batch([]).student_chunk_id.shape == (0, 1)
    assert aligner.align_batch([""]).student_chunk_id.tolist() == [[NO_CHUNK]]


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        pytest.param([5, 131_072], [5], "student id 131072 at token 1 is outside", id="too high"),
        pytest.param([5], [-100], "teacher id -100 at token 0 is outside", id="negative"),
        pytest.param(
            [[5]], [5], r"got shape \(1, 1\).*pass several samples to align_batch", id="2d"
        ),
        pytest.param([0.5], [5], "student ids are not a row of integers", id="fractions"),
    ],
)
def test_ids_that_are_no_ids_are_refused(aligner, student, teacher, message):
    with pytest.raises(AlignmentError, match=message):
        aligner.align_ids(student, teacher)
    ends = [np.arange(np.size(ids)) for ids in (student, teacher)]
    with pytest.raises(AlignmentError, match=message):
        aligner.align_encoded((student, ends[0]), (teacher, ends[1]))


def test_other_bad_input_is_refused(aligner):
    with pytest.raises(AlignmentError, match="ids and byte ends differ in number; got 1 ids and 2"):
        aligner.align_encoded(([5], np.array([1, 2])), ([5], np.array([1])))
    with pytest.raises(AlignmentError, match="student_length holds no token"):
        aligner.align_batch(["a"], student_length=0)
    with pytest.raises(AlignmentError, match="a batch is one text"):
        aligner.align_batch("abc")
    with pytest.raises(AlignmentError, match="sample 1 of the batch cannot be aligned; got tuple"):
        aligner.align_batch([([1], [1]), ([1], [1], [1])])
    with pytest.raises(AlignmentError, match="texts and ids are mixed"):
        aligner.align_batch(["a", ([5], [5])])


def test_an_empty_side_has_an_empty_alignment(aligner):
    empty = aligner.align_ids([], [aligner.teacher_tokenizer.bos_id])
    assert empty.chunk_count == 0
    assert empty.teacher_chunk_id.tolist() == [NO_CHUNK]
    assert aligner.align_encoded(([], np.empty(0, np.int64)), ([5], np.array([2]))).chunk_count == 0


def test_ids_of_both_sides_are_aligned_as_by_nemo_rl_s_call():
    from tests.data.readers import student_tokenizer, teacher_tokenizer

    student, teacher = student_tokenizer(), teacher_tokenizer()
    aligner, text = TokenAligner(student, teacher), "Le café coûte 2,50 €."
    ids = student.text_to_ids(text), teacher.text_to_ids(text)
    one, other = aligner.align(*ids), aligner.align_ids(*ids)
    assert (one.student_chunk_id == other.student_chunk_id).all()
    assert (one.teacher_chunk_id == other.teacher_chunk_id).all()
    with pytest.raises(AlignmentError, match="align takes one text"):
        aligner.align(ids[0])

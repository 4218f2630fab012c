"""Windows over real vocabularies: what both models read is the text, once, and the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import DataError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.datasets import TokenSequence, WindowDataset
from tests.training.tokenizer_pair import DOCUMENTS, student_tokenizer, teacher_tokenizer


def dataset(documents: list[str] = DOCUMENTS, **options: Any) -> WindowDataset:
    defaults: dict[str, Any] = {
        "student_tokenizer": student_tokenizer(),
        "student_length": 16,
        "teacher_tokenizer": teacher_tokenizer(),
        "teacher_length": 19,
    }
    return WindowDataset(documents, **defaults | options)


def text_of(side: TokenSequence, tokenizer: MegatronTokenizerText) -> bytes:
    """Bytes of the tokens that stand for any."""
    parts = [tokenizer.token_bytes(int(i)) for i in side.ids[side.text_bytes > 0]]
    assert None not in parts
    return b"".join(part for part in parts if part is not None)


def test_a_window_fits_both_models_behind_its_leading_token() -> None:
    data = dataset()
    assert len(data) > len(DOCUMENTS)
    for window in data:
        assert window.teacher is not None
        assert 1 < len(window.student.ids) <= 16 + 1
        assert 1 < len(window.teacher.ids) <= 19 + 1


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=3),
    st.integers(6, 24),
    st.integers(6, 24),
)
def test_every_byte_is_in_one_window_or_counted_as_dropped(
    documents: list[str], student_length: int, teacher_length: int
) -> None:
    total = sum(len(document.encode()) for document in documents)
    # The last document fits any window, so that there is one whatever the others are.
    data = dataset([*documents, "a"], student_length=student_length, teacher_length=teacher_length)
    total += 1
    assert data.byte_count + data.dropped_bytes == total
    assert data.byte_count == sum(window.byte_count for window in data)


def test_the_students_windows_spell_the_documents_in_order() -> None:
    spelled = b"".join(text_of(window.student, student_tokenizer()) for window in dataset())
    assert spelled == "".join(DOCUMENTS).encode()


def test_both_sides_of_a_window_spell_the_same_bytes() -> None:
    data = dataset()
    assert data.dropped_bytes == 0
    for window in data:
        assert window.teacher is not None
        student = text_of(window.student, student_tokenizer())
        # SentencePiece's space before a document is no byte of it.
        teacher = text_of(window.teacher, teacher_tokenizer())
        assert teacher in (student, b" " + student)
        assert len(student) == window.byte_count
        for side in (window.student, window.teacher):
            assert side.text_bytes.sum() == window.byte_count


def test_a_chunk_is_the_same_bytes_on_both_sides() -> None:
    for window in dataset():
        assert window.teacher is not None
        chunks = sorted(set(window.student.chunk_id.tolist()) - {NO_CHUNK})
        assert chunks == list(range(len(chunks)))
        assert set(window.teacher.chunk_id.tolist()) - {NO_CHUNK} == set(chunks)
        for chunk in chunks:
            student, teacher = (
                b"".join(
                    tokenizer.token_bytes(int(i)) or b"" for i in side.ids[side.chunk_id == chunk]
                )
                for side, tokenizer in (
                    (window.student, student_tokenizer()),
                    (window.teacher, teacher_tokenizer()),
                )
            )
            assert teacher in (student, b" " + student)


def test_a_window_is_led_by_bos_which_is_in_no_chunk_and_stands_for_no_byte() -> None:
    for window in dataset():
        for side, tokenizer in (
            (window.student, student_tokenizer()),
            (window.teacher, teacher_tokenizer()),
        ):
            assert side is not None
            assert side.ids[0] == tokenizer.bos
            assert side.chunk_id[0] == NO_CHUNK
            assert side.text_bytes[0] == 0


@pytest.mark.parametrize("append_eod", [True, False], ids=["eod", "no-eod"])
def test_only_the_last_window_of_a_document_ends_it(append_eod: bool) -> None:
    data = dataset(append_eod=append_eod)
    eod = student_tokenizer().eod
    ends = [window for window in data if window.student.ids[-1] == eod]
    assert len(ends) == (len(DOCUMENTS) if append_eod else 0)
    for window in ends:
        assert window.teacher is not None
        assert window.teacher.ids[-1] == teacher_tokenizer().eod
        last = window.student.chunk_id.max()
        assert window.student.chunk_id[-1] == window.teacher.chunk_id[-1] == last
        assert np.count_nonzero(window.student.chunk_id == last) == 1
        assert window.student.text_bytes[-1] == 0
    assert data.byte_count == len("".join(DOCUMENTS).encode())


def test_the_ends_of_documents_can_be_left_out_of_chunks() -> None:
    paired, unpaired = dataset(), dataset(pair_eod=False)
    eod = student_tokenizer().eod
    for window, plain in zip(paired, unpaired, strict=True):
        assert window.teacher is not None
        assert plain.teacher is not None
        for side, other in ((window.student, plain.student), (window.teacher, plain.teacher)):
            stop = -1 if window.student.ids[-1] == eod else None
            assert np.array_equal(side.ids, other.ids)
            assert np.array_equal(side.chunk_id[:stop], other.chunk_id[:stop])
            if stop is not None:
                assert other.chunk_id[-1] == NO_CHUNK
    counts, plain_counts = paired.chunk_counts, unpaired.chunk_counts
    assert counts is not None
    assert plain_counts is not None
    assert counts.chunks == plain_counts.chunks + len(DOCUMENTS)


def test_without_a_teacher_a_window_is_the_students_alone() -> None:
    data = dataset(teacher_tokenizer=None, teacher_length=None)
    assert all(window.teacher is None for window in data)
    assert all((window.student.chunk_id == NO_CHUNK).all() for window in data)
    assert data.chunk_counts is None
    assert data.summary()["chunk_shares"] is None


def test_the_summary_counts_windows_bytes_and_chunks_in_plain_values() -> None:
    data = dataset()
    summary = data.summary()
    assert summary["windows"] == len(data)
    assert summary["bytes"] == len("".join(DOCUMENTS).encode())
    assert summary["dropped_bytes"] == 0
    assert sum(summary["chunk_shares"].values()) == pytest.approx(1.0)
    assert data.chunk_counts is not None
    assert summary["chunk_counts"] == asdict(data.chunk_counts)
    assert data.chunk_counts.chunks == sum(
        len(set(window.student.chunk_id.tolist()) - {NO_CHUNK}) for window in data
    )


@pytest.mark.parametrize("multiple", [1, 4, 7, 64], ids=str)
def test_padding_to_a_multiple_adds_windows_that_predict_nothing(multiple: int) -> None:
    data = dataset()
    padded = data.padded_to_multiple(multiple)
    assert len(padded) % multiple == 0
    assert len(padded) - len(data) < multiple
    assert padded[: len(data)] == list(data)
    for window in padded[len(data) :]:
        assert window.byte_count == 0
        assert window.teacher is not None
        assert len(window.student.ids) == len(window.teacher.ids) == 1


def test_the_summary_tells_one_text_from_another() -> None:
    hashes = [dataset(texts).summary()["sha256"] for texts in (["ab", "c"], ["a", "bc"], ["abc"])]
    assert len(set(hashes)) == 3
    assert dataset(["ab", "c"], student_length=5).summary()["sha256"] == hashes[0]


def test_an_empty_document_makes_no_window() -> None:
    assert len(dataset(["", "some text", ""])) == 1


def test_text_that_no_window_can_hold_is_refused() -> None:
    with pytest.raises(DataError, match="got seq_length 1 and 1 bytes dropped; raise seq_length"):
        dataset(["a"], student_length=1, teacher_length=1)


def test_the_ids_of_a_window_are_those_of_the_whole_document() -> None:
    document = DOCUMENTS[3]
    ids = np.concatenate([window.student.ids[1:] for window in dataset([document])])
    assert ids.tolist() == [*student_tokenizer().tokenize(document), student_tokenizer().eod]

"""Labels, padding and chunk ids of a microbatch, against loops that are too slow to use."""

from __future__ import annotations

from dataclasses import astuple
from functools import cache

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.training.collator import Batch, collate
from megatron_ext.training.datasets import TokenSequence, Window, WindowDataset
from tests.training.tokenizer_pair import DOCUMENTS, student_tokenizer, teacher_tokenizer

STUDENT_LENGTH, TEACHER_LENGTH = 16, 21


@cache
def windows() -> list[Window]:
    """Windows of different lengths, and one that predicts nothing."""
    data = WindowDataset(
        DOCUMENTS,
        student_tokenizer=student_tokenizer(),
        student_length=STUDENT_LENGTH,
        teacher_tokenizer=teacher_tokenizer(),
        teacher_length=TEACHER_LENGTH,
    )
    return data.padded_to_multiple(len(data) + 1)


def batch_of(chosen: list[Window], *, text_only: bool = False) -> Batch:
    return collate(
        chosen,
        student_length=STUDENT_LENGTH,
        teacher_length=TEACHER_LENGTH,
        text_only=text_only,
    )


def sides_of(batch: Batch, chosen: list[Window]):
    """(tokens, sequences, chunk ids) of the student and of the teacher."""
    assert batch.teacher is not None
    assert batch.alignment is not None
    return [
        (batch.student, [w.student for w in chosen], batch.alignment.student_chunk_id),
        (batch.teacher, [w.teacher for w in chosen], batch.alignment.teacher_chunk_id),
    ]


@pytest.mark.parametrize("text_only", [False, True], ids=["training", "text-only"])
def test_a_label_is_the_next_token_and_padding_has_none(text_only: bool) -> None:
    batch = batch_of(windows(), text_only=text_only)
    for tokens, sequences, _ in sides_of(batch, windows()):
        for row, sequence in enumerate(sequences):
            assert isinstance(sequence, TokenSequence)
            for position in range(tokens.labels.shape[1]):
                expected = IGNORE_INDEX
                if position + 1 < len(sequence.ids):
                    assert tokens.tokens[row, position] == sequence.ids[position]
                    if not text_only or sequence.text_bytes[position + 1]:
                        expected = sequence.ids[position + 1]
                assert tokens.labels[row, position] == expected


def test_a_chunk_id_stands_where_its_token_is_the_label() -> None:
    batch = batch_of(windows())
    assert batch.alignment is not None
    offset = 0
    for row, window in enumerate(windows()):
        assert window.teacher is not None
        for sequence, chunk_id in (
            (window.student, batch.alignment.student_chunk_id),
            (window.teacher, batch.alignment.teacher_chunk_id),
        ):
            expected = [NO_CHUNK] * chunk_id.shape[1]
            for position, chunk in enumerate(sequence.chunk_id[1:]):
                if chunk != NO_CHUNK:
                    expected[position] = offset + int(chunk)
            assert chunk_id[row].tolist() == expected
        offset += int(window.student.chunk_id.max(initial=NO_CHUNK)) + 1
    assert batch.chunk_count == offset
    assert batch.alignment is not None
    assert batch.teacher is not None
    sizes = batch.alignment.chunk_class.bincount(minlength=4).tolist()
    in_none = [
        int(((side.labels != IGNORE_INDEX) & (chunk_id == NO_CHUNK)).sum())
        for side, chunk_id in (
            (batch.student, batch.alignment.student_chunk_id),
            (batch.teacher, batch.alignment.teacher_chunk_id),
        )
    ]
    assert astuple(batch.chunk_counts) == (*sizes, *in_none)
    assert max(in_none) > 0


def test_positions_count_from_zero_in_every_row() -> None:
    batch = batch_of(windows()[:3])
    assert batch.student.position_ids.tolist() == [list(range(STUDENT_LENGTH))] * 3


def test_the_counts_are_those_of_the_labels_and_of_the_text() -> None:
    chosen = windows()
    batch, text_only = batch_of(chosen), batch_of(chosen, text_only=True)
    assert batch.token_count == sum(len(window.student.ids) - 1 for window in chosen)
    assert text_only.token_count == batch.token_count - len(DOCUMENTS)
    for tokens in (text_only.student, text_only.teacher):
        assert tokens is not None
        assert tokens.byte_count == sum(window.byte_count for window in chosen)


def test_a_window_that_predicts_nothing_adds_nothing() -> None:
    blank = batch_of(windows()[-1:])
    assert (blank.token_count, blank.chunk_count, blank.student.byte_count) == (0, 0, 0)
    assert (blank.student.labels == IGNORE_INDEX).all()


def test_without_a_teachers_length_the_teacher_is_left_out() -> None:
    batch = collate(windows(), student_length=STUDENT_LENGTH)
    assert batch.teacher is None
    assert batch.alignment is None
    assert batch.chunk_count == 0
    assert torch.equal(batch.student.labels, batch_of(windows()).student.labels)


def test_a_batch_moves_to_another_device_whole() -> None:
    batch = batch_of(windows()[:2]).to(torch.device("meta"))
    assert batch.teacher is not None
    assert batch.alignment is not None
    for tensor in (
        batch.student.tokens,
        batch.student.labels,
        batch.teacher.position_ids,
        batch.alignment.teacher_chunk_id,
    ):
        assert tensor.device.type == "meta"
    assert batch.token_count == batch_of(windows()[:2]).token_count

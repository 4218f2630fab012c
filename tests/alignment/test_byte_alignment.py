"""Chunks from byte ends, against a brute-force truth over sets of bytes."""

from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import Alignment, ChunkClass, align_byte_ends, byte_alignment
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError
from tests.alignment.brute_force import assert_spans_of_chunks, brute_force_chunks, chunks_of
from tests.alignment.byte_end_strategies import ends_of, pairs


@given(pairs())
@settings(deadline=None)
def test_chunks_are_the_groups_of_tokens_that_share_bytes(pair):
    alignment = align_byte_ends(*pair)
    assert chunks_of(alignment) == brute_force_chunks(*(ends.tolist() for ends in pair))
    ids = alignment.student_chunk_id, alignment.teacher_chunk_id
    assert [len(side) for side in ids] == [len(ends) for ends in pair]
    assert alignment.is_exact.all()


def aligned_in_blocks(pair, block_tokens):
    with mock.patch.object(byte_alignment, "BLOCK_TOKENS", block_tokens):
        return align_byte_ends(*pair)


def assert_equal(first, second):
    for field in fields(Alignment):
        left, right = getattr(first, field.name), getattr(second, field.name)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right), field.name


@given(pairs(), st.integers(1, 6))
@settings(deadline=None)
def test_blocks_of_any_size_give_the_alignment_of_the_whole(pair, block_tokens):
    assert_equal(aligned_in_blocks(pair, block_tokens), align_byte_ends(*pair))


@pytest.mark.parametrize("least_width", [0, 1], ids=["zero-width tokens", "none"])
def test_a_sequence_of_several_blocks_is_aligned_as_one_block(least_width):
    generator = np.random.default_rng(0)
    token_counts = (3 * byte_alignment.BLOCK_TOKENS + 1, 2 * byte_alignment.BLOCK_TOKENS)
    pair = [np.cumsum(generator.integers(least_width, 7, size=count)) for count in token_counts]
    alignment = align_byte_ends(*pair)
    assert alignment.teacher_spans[-1, 0] > byte_alignment.BLOCK_TOKENS
    assert_equal(alignment, aligned_in_blocks(pair, max(token_counts)))


@given(pairs())
@settings(deadline=None)
def test_a_span_starts_and_ends_with_a_token_of_its_chunk_and_spans_ascend(pair):
    assert_spans_of_chunks(align_byte_ends(*pair))


@given(pairs(), st.data())
@settings(deadline=None)
def test_a_zero_width_token_anywhere_shifts_positions_and_changes_no_chunk(pair, data):
    student, teacher = pair
    before = align_byte_ends(student, teacher)
    where = data.draw(st.integers(0, len(student)))
    end = student[where - 1] if where else 0
    after = align_byte_ends(np.insert(student, where, end), teacher)
    assert after.student_chunk_id[where] == NO_CHUNK
    assert np.array_equal(np.delete(after.student_chunk_id, where), before.student_chunk_id)
    assert np.array_equal(after.teacher_chunk_id, before.teacher_chunk_id)
    assert np.array_equal(after.teacher_spans, before.teacher_spans)


@pytest.mark.parametrize(
    ("student", "teacher", "student_spans", "student_ids"),
    [
        pytest.param([0, 1, 3], [1, 3], [[1, 2], [2, 3]], [-1, 0, 1], id="at the start"),
        pytest.param([1, 3, 3], [1, 3], [[0, 1], [1, 2]], [0, 1, -1], id="at the end"),
        pytest.param([1, 1, 3], [1, 3], [[0, 1], [2, 3]], [0, -1, 1], id="between chunks"),
        pytest.param([1, 1, 3], [3], [[0, 3]], [0, -1, 0], id="inside a chunk"),
        pytest.param([0, 0], [1], [], [-1, -1], id="alone"),
    ],
)
def test_a_zero_width_token_is_in_no_chunk(student, teacher, student_spans, student_ids):
    alignment = align_byte_ends(np.array(student), np.array(teacher))
    assert alignment.student_spans.tolist() == student_spans
    assert alignment.student_chunk_id.tolist() == student_ids


def test_spans_and_ids_are_int32():
    alignment = align_byte_ends(ends_of(1, 2), ends_of(3))
    assert alignment.student_spans.dtype == alignment.teacher_spans.dtype == np.int32
    assert alignment.student_chunk_id.dtype == alignment.teacher_chunk_id.dtype == np.int32
    assert alignment.is_exact.dtype == np.bool_


def test_arguments_are_left_as_they_are():
    student, teacher = ends_of(1, 0, 2), ends_of(3)
    student.setflags(write=False)
    teacher.setflags(write=False)
    assert align_byte_ends(student, teacher).chunk_count == 1


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        pytest.param([3, 2], "token 1; got 2; expected at least 3", id="falling"),
        pytest.param([-1, 2], "token 0; got -1; expected at least 0", id="negative"),
        pytest.param([[1, 2]], "shape", id="two rows"),
        pytest.param([0.5, 1.0], "float64", id="fractions"),
    ],
)
def test_ends_that_are_no_ends_are_refused(ends, message):
    with pytest.raises(AlignmentError, match=message):
        align_byte_ends(ends_of(1), np.array(ends))
    with pytest.raises(AlignmentError, match="student"):
        align_byte_ends(np.array(ends), ends_of(1))


@given(pairs())
@settings(deadline=None)
def test_classes_and_starts_are_those_of_the_chunk_ids(pair):
    alignment = align_byte_ends(*pair)
    sizes = [[len(tokens) for tokens in chunk] for chunk in chunks_of(alignment)]
    expected = [2 * (student > 1) + (teacher > 1) for student, teacher in sizes]
    assert alignment.chunk_class.tolist() == expected
    assert alignment.chunk_class.dtype == np.int8
    for ids, starts in (
        (alignment.student_chunk_id, alignment.student_is_chunk_start),
        (alignment.teacher_chunk_id, alignment.teacher_is_chunk_start),
    ):
        first = [int(np.argmax(ids == chunk)) for chunk in range(alignment.chunk_count)]
        assert np.flatnonzero(starts).tolist() == first


def test_the_classes_of_a_chunk_say_how_many_tokens_each_side_has():
    alignment = align_byte_ends(ends_of(1, 2, 1, 1, 2, 2), ends_of(1, 1, 1, 2, 1, 3))
    assert [ChunkClass(kind).name for kind in alignment.chunk_class] == [
        "ONE_TO_ONE",
        "ONE_TO_MANY",
        "MANY_TO_ONE",
        "MANY_TO_MANY",
    ]

"""Counts of chunks by size."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_ext.alignment import ChunkCounts, align_byte_ends
from megatron_ext.alignment.alignment import CHUNK_KINDS
from tests.alignment.byte_end_strategies import ends_of, pairs


@pytest.mark.parametrize(
    ("student", "teacher", "counts"),
    [
        pytest.param([2], [2], {"one_to_one": 1}, id="1:1"),
        pytest.param([2], [1, 1], {"one_to_many": 1}, id="1:n"),
        pytest.param([1, 1], [2], {"many_to_one": 1}, id="n:1"),
        pytest.param([1, 2], [2, 1], {"many_to_many": 1}, id="n:m"),
        pytest.param([0, 2], [2, 0, 0], {"one_to_one": 1, "student_unaligned": 1,
                                         "teacher_unaligned": 2}, id="control tokens"),
        pytest.param([1, 0, 1], [2], {"many_to_one": 1, "student_unaligned": 1},
                     id="control token inside a chunk"),
        pytest.param([], [], {}, id="nothing"),
    ],
)  # fmt: skip
def test_chunks_are_counted_by_the_tokens_in_them(student, teacher, counts):
    assert ChunkCounts.of(align_byte_ends(ends_of(*student), ends_of(*teacher))) == ChunkCounts(
        **counts
    )


@given(pairs())
@settings(deadline=None)
def test_every_chunk_and_every_token_is_counted_once(pair):
    alignment = align_byte_ends(*pair)
    counts = ChunkCounts.of(alignment)
    assert counts.chunks == alignment.chunk_count
    assert counts.student_unaligned == np.count_nonzero(alignment.student_chunk_id < 0)
    assert counts.teacher_unaligned == np.count_nonzero(alignment.teacher_chunk_id < 0)


def test_counts_add_up():
    counts = ChunkCounts(one_to_one=2, many_to_one=1, student_unaligned=4)
    total = counts + ChunkCounts(one_to_one=1, one_to_many=3, many_to_many=1, teacher_unaligned=5)
    assert total == ChunkCounts(
        one_to_one=3,
        one_to_many=3,
        many_to_one=1,
        many_to_many=1,
        student_unaligned=4,
        teacher_unaligned=5,
    )


def test_shares_are_of_the_chunks():
    counts = ChunkCounts(one_to_one=3, many_to_many=1, student_unaligned=9)
    assert counts.shares() == {
        "one_to_one": 0.75,
        "one_to_many": 0.0,
        "many_to_one": 0.0,
        "many_to_many": 0.25,
    }
    assert ChunkCounts(student_unaligned=9).shares() == {}


def test_counts_have_the_names_of_the_kinds_of_chunks():
    names = [field.name for field in dataclasses.fields(ChunkCounts)]
    assert names == [*CHUNK_KINDS, "student_unaligned", "teacher_unaligned"]

"""Chunks within corresponding ranges, against a brute-force truth over sets of bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import align_byte_ends
from megatron_ext.alignment.text_alignment import Segments, align_segments
from tests.alignment.brute_force import brute_force_segments, chunks_of
from tests.alignment.byte_end_strategies import byte_ends, ends_of


def segments_of(*pairs):
    rows = np.array(pairs, np.int64).reshape(-1, 2, 2)
    return Segments(rows[:, 0], rows[:, 1])


@st.composite
def cases(draw):
    """Byte ends of both sides, and ranges of equal lengths with anything between."""
    pairs, at = [], [0, 0]
    for length in draw(st.lists(st.integers(1, 6), max_size=4)):
        at = [place + draw(st.integers(0, 3)) for place in at]
        pairs.append([[place, place + length] for place in at])
        at = [place + length for place in at]
    totals = [place + draw(st.integers(0, 3)) for place in at]
    return *(draw(byte_ends(total)) for total in totals), pairs


@given(cases())
@settings(deadline=None)
def test_chunks_are_the_groups_of_tokens_inside_the_ranges(case):
    student, teacher, pairs = case
    alignment = align_segments(student, teacher, segments_of(*pairs))
    assert chunks_of(alignment) == brute_force_segments(student, teacher, pairs)
    for spans, ids in (
        (alignment.student_spans, alignment.student_chunk_id),
        (alignment.teacher_spans, alignment.teacher_chunk_id),
    ):
        for chunk, (start, stop) in enumerate(spans.tolist()):
            assert ids[start] == ids[stop - 1] == chunk


@given(st.integers(1, 24).flatmap(lambda n: st.tuples(byte_ends(n), byte_ends(n), st.just(n))))
@settings(deadline=None)
def test_one_range_of_everything_gives_the_chunks_of_equal_bytes(case):
    student, teacher, total = case
    ranges = segments_of([[0, total], [0, total]])
    ours, plain = align_segments(student, teacher, ranges), align_byte_ends(student, teacher)
    assert np.array_equal(ours.student_spans, plain.student_spans)
    assert np.array_equal(ours.teacher_chunk_id, plain.teacher_chunk_id)


CASES = {
    "a header": ((3, 2, 2), (2, 2), [[[3, 7], [0, 4]]], ([-1, 0, 1], [0, 1])),
    "straddles": ((4, 2), (1, 2, 2), [[[3, 6], [0, 3]]], ([-1, 0], [-1, 0, -1])),
    "wholes": ((2, 3), (2, 7), [[[0, 2], [0, 2]], [[2, 5], [2, 9]]], ([0, 1], [0, 1])),
    "no whole": ((2, 1, 2), (2, 7), [[[2, 5], [2, 9]]], ([-1, -1, -1], [-1, -1])),
    "inserted": ((2, 2), (2, 3, 2), [[[0, 2], [0, 2]], [[2, 4], [5, 7]]], ([0, 1], [0, -1, 1])),
    "nothing corresponds": ((2,), (2,), [], ([-1], [-1])),
}


@pytest.mark.parametrize(("student", "teacher", "pairs", "ids"), CASES.values(), ids=CASES)
def test_what_is_outside_of_ranges_is_in_no_chunk(student, teacher, pairs, ids):
    alignment = align_segments(ends_of(*student), ends_of(*teacher), segments_of(*pairs))
    assert (alignment.student_chunk_id.tolist(), alignment.teacher_chunk_id.tolist()) == ids


def test_no_tokens_give_no_chunks():
    alignment = align_segments(ends_of(), ends_of(2), segments_of([[0, 2], [0, 2]]))
    assert alignment.chunk_count == 0
    assert alignment.teacher_chunk_id.tolist() == [-1]

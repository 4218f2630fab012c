"""Both sides of a text cut at one byte, against a slow search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import AlignedTokens, Tokens, align_byte_ends, truncate
from megatron_ext.errors import AlignmentError
from tests.alignment.byte_end_strategies import ends_of, pairs

lengths = st.one_of(st.none(), st.integers(1, 12))


def aligned_of(student, teacher):
    sides = [Tokens(np.arange(len(ends), dtype=np.int32), ends) for ends in (student, teacher)]
    return AlignedTokens(*sides, align_byte_ends(student, teacher))


def slow_counts(student, teacher, budget):
    """Tokens to keep: to the last common byte whose tokens fit, and what follows the whole text."""
    sides = [student.tolist(), teacher.tolist()]
    budget = [len(side) if most is None else most for side, most in zip(sides, budget, strict=True)]
    best = [min(side.count(0), most) for side, most in zip(sides, budget, strict=True)]
    common = set(sides[0]) & set(sides[1]) - {0}
    fitting = [
        [side.index(byte) + 1 for side in sides]
        for byte in sorted(common)
        if all(side.index(byte) < most for side, most in zip(sides, budget, strict=True))
    ]
    if len(fitting) == len(common) and max([0, *sides[0]]) == max([0, *sides[1]]):
        return [min(len(side), most) for side, most in zip(sides, budget, strict=True)]
    return fitting[-1] if fitting else best


@given(pairs(), lengths, lengths)
@settings(deadline=None)
def test_tokens_kept_are_those_of_a_slow_search(pair, student_length, teacher_length):
    cut = truncate(aligned_of(*pair), student_length=student_length, teacher_length=teacher_length)
    kept = [len(cut.student.ids), len(cut.teacher.ids)]
    assert kept == slow_counts(*pair, (student_length, teacher_length))


@given(pairs(), lengths, lengths)
@settings(deadline=None)
def test_both_sides_end_with_the_same_byte_and_align_as_ever(pair, student_length, teacher_length):
    cut = truncate(aligned_of(*pair), student_length=student_length, teacher_length=teacher_length)
    student, teacher = cut.student.ends, cut.teacher.ends
    assert student[-1:].tolist() in (teacher[-1:].tolist(), [], [0])
    assert teacher[-1:].tolist() in (student[-1:].tolist(), [], [0])
    again = align_byte_ends(student, teacher)
    for name in ("student_spans", "teacher_spans", "student_chunk_id", "teacher_chunk_id"):
        assert np.array_equal(getattr(cut.alignment, name), getattr(again, name))


@pytest.mark.parametrize(
    ("student_length", "kept"),
    [
        pytest.param(5, (5, 4), id="the whole text"),
        pytest.param(4, (4, 4), id="no room for EOS"),
        pytest.param(3, (3, 2), id="cut, and BOS stays"),
        pytest.param(1, (1, 1), id="BOS alone"),
    ],
)
def test_bos_stays_and_eos_goes_with_the_end_of_the_text(student_length, kept):
    aligned = aligned_of(ends_of(0, 2, 1, 2, 0), ends_of(0, 3, 2, 0))
    cut = truncate(aligned, student_length=student_length)
    assert (len(cut.student.ids), len(cut.teacher.ids)) == kept


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_length_of_no_token_is_refused(side):
    with pytest.raises(AlignmentError, match=f"{side}_length holds no token; got 0"):
        truncate(aligned_of(ends_of(1), ends_of(1)), **{f"{side}_length": 0})

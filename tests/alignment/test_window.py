"""Windows of a long text: what they cover, and that they fit."""

from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import (
    AlignedTokens,
    Tokens,
    Windows,
    align_byte_ends,
    byte_alignment,
    cut_windows,
    truncate,
)
from megatron_ext.errors import AlignmentError
from tests.alignment.byte_end_strategies import byte_ends, ends_of, pairs

budgets = st.tuples(st.integers(1, 6), st.integers(1, 6))


def slow_windows(student, teacher, student_length, teacher_length):
    """Byte bounds of kept and of dropped ranges, one chunk at a time."""
    common = sorted((set(student.tolist()) & set(teacher.tolist())) - {0})
    total = max([0, *student.tolist(), *teacher.tolist()])
    kept, dropped = [], []

    def tokens(ends, start, stop):
        before = np.searchsorted(ends, start, side="right") if start else 0
        last = stop == ends[-1]
        # Those at the start boundary belong here; those at the stop belong to the next window.
        first = before - np.count_nonzero((ends == start) & (np.diff(ends, prepend=0) == 0))
        first = 0 if start == 0 else first
        after = len(ends) if last else np.searchsorted(ends, stop, side="left") + 1
        return after - first

    def fits(start, stop):
        return (
            tokens(student, start, stop) <= student_length
            and tokens(teacher, start, stop) <= teacher_length
        )

    start = 0
    while common:
        stops = [stop for stop in common if fits(start, stop)]
        stop = max(stops) if stops else common[0]
        (kept if stops else dropped).append([start, stop])
        common = [boundary for boundary in common if boundary > stop]
        start = stop
    if start < total:
        dropped.append([start, total])
    return kept, dropped


@given(pairs(), budgets)
# One byte behind the last chunk.
@example((ends_of(1), ends_of(1, 1)), (2, 2))
@settings(deadline=None)
def test_windows_are_those_of_a_slow_search(pair, budget):
    windows = cut_windows(*pair, student_length=budget[0], teacher_length=budget[1])
    kept, dropped = slow_windows(*pair, *budget)
    assert windows.byte_bounds.tolist() == kept
    assert windows.dropped_byte_bounds.tolist() == dropped
    assert windows.dropped_bytes == sum(stop - start for start, stop in dropped)


@given(pairs(), budgets)
@settings(deadline=None)
def test_a_window_fits_both_budgets_and_its_tokens_cover_its_bytes(pair, budget):
    windows = cut_windows(*pair, student_length=budget[0], teacher_length=budget[1])
    sides = (windows.student_bounds, windows.teacher_bounds)
    for ends, bounds, length in zip(pair, sides, budget, strict=True):
        for (first, last), (start, stop) in zip(bounds, windows.byte_bounds, strict=True):
            assert 0 < last - first <= length
            assert (ends[first - 1] if first else 0) == start
            assert ends[last - 1] == stop


@given(st.integers(0, 24).flatmap(byte_ends), st.integers(1, 6))
@settings(deadline=None)
def test_a_student_alone_is_cut_as_against_itself(ends, length):
    alone = cut_windows(ends, student_length=length)
    paired = cut_windows(ends, ends, student_length=length, teacher_length=length)
    assert np.array_equal(alone.student_bounds, paired.student_bounds)
    assert np.array_equal(alone.teacher_bounds, paired.student_bounds)
    assert np.array_equal(alone.byte_bounds, paired.byte_bounds)


@given(pairs(), budgets, st.integers(1, 6))
@settings(deadline=None)
def test_blocks_of_any_size_give_the_windows_of_the_whole(pair, budget, block_tokens):
    lengths = {"student_length": budget[0], "teacher_length": budget[1]}
    whole = cut_windows(*pair, **lengths)
    with mock.patch.object(byte_alignment, "BLOCK_TOKENS", block_tokens):
        blocked = cut_windows(*pair, **lengths)
    for field in fields(Windows):
        assert np.array_equal(getattr(blocked, field.name), getattr(whole, field.name))


def test_a_chunk_longer_than_a_budget_is_dropped_and_counted():
    student, teacher = ends_of(1, 1, 5, 1, 1), ends_of(1, 1, 1, 1, 1, 1, 1, 1, 1)
    windows = cut_windows(student, teacher, student_length=4, teacher_length=4)
    assert windows.byte_bounds.tolist() == [[0, 2], [7, 9]]
    assert windows.student_bounds.tolist() == [[0, 2], [3, 5]]
    assert windows.teacher_bounds.tolist() == [[0, 2], [7, 9]]
    assert windows.dropped_byte_bounds.tolist() == [[2, 7]]
    assert windows.dropped_bytes == 5


def test_bos_opens_the_first_window_and_eos_closes_the_last():
    student, teacher = ends_of(0, 2, 2, 2, 0), ends_of(0, 0, 2, 2, 2)
    windows = cut_windows(student, teacher, student_length=3, teacher_length=4)
    assert windows.student_bounds.tolist() == [[0, 3], [3, 5]]
    assert windows.teacher_bounds.tolist() == [[0, 4], [4, 5]]


def test_a_text_without_bytes_has_no_window():
    windows = cut_windows(ends_of(0, 0), ends_of(0), student_length=4)
    assert windows.count == 0
    assert windows.student_bounds.shape == windows.dropped_byte_bounds.shape == (0, 2)
    assert windows.dropped_bytes == 0


def test_bounds_are_int64():
    windows = cut_windows(ends_of(1, 2), ends_of(3), student_length=2)
    for bounds in (windows.student_bounds, windows.teacher_bounds, windows.byte_bounds):
        assert bounds.dtype == np.int64
    assert windows.dropped_byte_bounds.dtype == np.int64


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
    lengths = {"student_length": 4, "teacher_length": 4, f"{side}_length": 0}
    with pytest.raises(AlignmentError, match=f"{side}_length holds no token; got 0"):
        cut_windows(ends_of(1), ends_of(1), **lengths)
    with pytest.raises(AlignmentError, match=f"{side}_length holds no token; got 0"):
        truncate(aligned_of(ends_of(1), ends_of(1)), **{f"{side}_length": 0})

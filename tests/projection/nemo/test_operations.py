"""The known tools' steps over a projection that is there."""

import json

import pytest

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.nemo.operations import (
    MultitokenOptions,
    multitoken_projection,
    reapply_exact_map,
    sort_and_cut,
)
from tests.projection.nemo.test_diagnosis import OWN_SHARES, PAIR, entries_of
from tests.projection.projection_rows import rows_of

TABLE = [{0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, [(1, 0.3), (2, 0.4), (1, 0.3)], {3: 1.0}, {}]


def test_the_largest_entries_stay_and_sum_to_one():
    result = sort_and_cut(entries_of(TABLE), 2)
    expected = [{2: 3 / 7, 3: 4 / 7}, {1: 0.6, 2: 0.4}, {3: 1.0}, {}]
    assert rows_of(result.projection) == [pytest.approx(r, rel=1e-6) for r in expected]
    assert result.cut_mass == pytest.approx(0.3)
    assert result.projection.is_exact_row.tolist() == [False, False, True, False]


def filled(row):
    """A row whose last slot the scale trick has overwritten."""
    return [*row, *[(9, 0.0)] * (3 - len(row)), (5, 1 / 6)]


WITH_FILLER = [
    filled([(0, 0.75), (1, 0.0825), (2, 0.0008)]),
    filled([(1, 5 / 6)]),
    [(2, 1.0)],
    filled([(3, 5 / 6)]),
]


def test_a_filler_is_left_out():
    result = sort_and_cut(entries_of(WITH_FILLER), 2)
    assert 5 not in result.projection.indices
    assert result.filler_rows == 3
    assert result.filler_mass == pytest.approx(0.5, abs=1e-3)
    assert rows_of(result.projection)[1] == rows_of(result.projection)[1] == {1: 1.0}
    assert result.projection.is_exact_row.tolist() == [False, False, True, False]


def test_the_last_slot_is_kept_where_asked_for():
    result = sort_and_cut(entries_of(WITH_FILLER), 2, preserve_last=True)
    assert set(rows_of(result.projection)[0]) == {0, 5}
    assert rows_of(result.projection)[1] == pytest.approx({1: 5 / 6, 5: 1 / 6}, rel=1e-6)
    assert result.filler_rows == 0
    assert json.loads(result.projection.metadata["history"]) == [
        {"step": "sort_and_cut", "top_k": 2, "preserve_last": True}
    ]


def test_a_cut_to_nothing_is_refused():
    with pytest.raises(ProjectionError, match="top_k leaves no entry"):
        sort_and_cut(entries_of(TABLE), 0)


def test_tokens_that_both_have_are_mapped_to_themselves_alone():
    entries = entries_of([{1: 1.0}, {0: 0.5, 1: 0.5}, {3: 1.0}, {0: 1.0}, {}])
    projection = reapply_exact_map(entries, PAIR)
    assert rows_of(projection) == [{0: 1.0}, {0: 0.5, 1: 0.5}, {3: 1.0}, {2: 1.0}, {4: 1.0}]
    assert projection.is_exact_row.tolist() == [True, False, False, True, True]
    assert projection.metadata["student_fingerprint"] == PAIR.student.fingerprint()


def test_rows_of_a_padded_file_stay():
    entries = entries_of([{1: 1.0}] * 7)
    with pytest.raises(ProjectionError, match="padding"):
        reapply_exact_map(entries, PAIR)
    assert reapply_exact_map(entries_of([*[{1: 1.0}] * 5, {}, {}]), PAIR).shape == (7, 5)


def test_the_multitoken_map_has_exact_rows_and_decaying_pieces():
    projection = multitoken_projection(PAIR, MultitokenOptions())
    assert rows_of(projection)[0] == {0: 1.0}
    assert rows_of(projection)[2] == pytest.approx(OWN_SHARES, rel=1e-6)


def test_fewer_pieces_than_entries_can_be_asked_for():
    projection = multitoken_projection(PAIR, MultitokenOptions(tokens_to_cut=1))
    assert rows_of(projection) == [{0: 1.0}, {0: 1.0}, {0: 1.0}, {2: 1.0}, {4: 1.0}]
    assert projection.is_exact_row.tolist() == [True, False, False, True, True]


def test_an_initial_map_adds_to_rows_that_are_not_exact():
    initial = entries_of([{3: 1.0}, {3: 1.0}, {}, {3: 1.0}, {}])
    projection = multitoken_projection(PAIR, MultitokenOptions(), initial)
    assert rows_of(projection)[0] == {0: 1.0}
    assert rows_of(projection)[1] == pytest.approx({0: 5 / 11, 1: 0.5 / 11, 3: 0.5}, rel=1e-6)
    assert rows_of(projection)[2] == pytest.approx(OWN_SHARES, rel=1e-6)


@pytest.mark.parametrize(
    ("initial", "role"), [([{}] * 5 + [{1: 1.0}], "student"), ([{5: 1.0}], "teacher")]
)
def test_an_initial_map_of_other_vocabularies_is_refused(initial, role):
    with pytest.raises(ProjectionError, match=f"of a larger {role} vocabulary; got id 5"):
        multitoken_projection(PAIR, MultitokenOptions(), entries_of(initial))

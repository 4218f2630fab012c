"""What a projection is, and what it refuses to be."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection, compose, drop_padding, fill_empty_rows
from megatron_ext.projection.layout import VocabularyLayout
from tests.projection.projection_rows import dense, projection_of, random_projections, rows_of

ROWS = [{0: 1.0}, {}, {1: 0.75, 4: 0.25}, {4: 1.0}]


@given(random_projections())
@settings(deadline=None)
def test_normalised_rows_are_a_projection(projection):
    matrix = dense(projection)
    assert projection.entry_count == np.count_nonzero(matrix)
    assert projection.empty_rows.tolist() == np.flatnonzero(~matrix.any(axis=1)).tolist()
    assert projection.reachable_columns.tolist() == matrix.any(axis=0).tolist()
    assert projection.reachable_rows.tolist() == matrix.any(axis=1).tolist()
    assert projection.is_exact_row.tolist() == [len(row) == 1 for row in rows_of(projection)]
    np.testing.assert_allclose(projection.column_mass, matrix.sum(axis=0), rtol=1e-6)


@given(random_projections(), st.integers(0, 8), st.integers(0, 8))
@settings(deadline=None)
def test_a_row_block_is_those_rows_and_padding_rows_are_empty(projection, start, size):
    block = projection.row_block(start, start + size)
    padded = np.zeros((16, 6), np.float32)
    padded[: projection.shape[0]] = dense(projection)
    assert np.array_equal(dense(block), padded[start : start + size])
    assert block.shape == (size, 6)
    exact = [*projection.is_exact_row.tolist(), *[False] * 16][start : start + size]
    assert block.is_exact_row.tolist() == exact
    assert block.vocab_sizes == (len(range(start, min(start + size, projection.shape[0]))), 6)


@given(random_projections(), st.integers(0, 8), st.integers(0, 8))
@settings(deadline=None)
def test_a_column_block_is_those_columns_counted_from_its_start(projection, start, size):
    block = projection.column_block(start, start + size)
    padded = np.zeros((projection.shape[0], 16), np.float32)
    padded[:, :6] = dense(projection)
    assert np.array_equal(dense(block), padded[:, start : start + size])
    assert block.shape == (projection.shape[0], size)
    assert (block.indptr.dtype, block.indices.dtype) == (np.int64, np.int32)


@given(random_projections())
@settings(deadline=None)
def test_the_transpose_has_rows_and_columns_swapped_and_ascending(projection):
    transposed = projection.transpose()
    assert np.array_equal(dense(transposed), dense(projection).T)
    assert all(list(row) == sorted(row) for row in rows_of(transposed))
    assert (transposed.indptr.dtype, transposed.indices.dtype) == (np.int64, np.int32)
    assert np.array_equal(dense(transposed.transpose()), dense(projection))


@given(random_projections(), st.integers(1, 7))
@settings(deadline=None)
def test_top_k_keeps_the_largest_shares_of_each_row(projection, k):
    for cut, whole in zip(rows_of(projection.top_k(k)), rows_of(projection), strict=True):
        kept = dict(sorted(whole.items(), key=lambda entry: (-entry[1], entry[0]))[:k])
        total = sum(kept.values())
        assert cut == pytest.approx({c: share / total for c, share in kept.items()}, rel=1e-6)


def test_of_equal_shares_top_k_keeps_those_of_the_lowest_columns():
    cut = projection_of([{1: 0.25, 2: 0.25, 4: 0.25, 5: 0.25}]).top_k(2)
    assert rows_of(cut) == [{1: 0.5, 2: 0.5}]
    assert cut.top_k(1).is_exact_row.tolist() == [False]
    assert json.loads(cut.top_k(1).metadata["history"]) == [
        {"step": "top_k", "k": 2},
        {"step": "top_k", "k": 1},
    ]


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_a_top_k_of_no_entries_is_refused(k):
    with pytest.raises(ProjectionError, match="top_k: top_k leaves no entry in a row"):
        projection_of(ROWS).top_k(k)


# Padding.


@given(random_projections(), st.integers(0, 3), st.integers(0, 3))
@settings(deadline=None)
def test_padding_is_empty_and_can_be_taken_off_again(projection, more_rows, more_columns):
    sizes = projection.shape
    padded = projection.padded(sizes[0] + more_rows, sizes[1] + more_columns)
    expected = np.pad(dense(projection), ((0, more_rows), (0, more_columns)))
    assert np.array_equal(dense(padded), expected)
    assert (padded.shape, padded.vocab_sizes) == (expected.shape, sizes)
    assert padded.empty_rows.tolist() == projection.empty_rows.tolist()
    assert padded.padded(*sizes) == projection
    assert padded.top_k(2).vocab_sizes == padded.row_block(0, 99).vocab_sizes == sizes


def test_a_padded_projection_is_another_than_one_of_a_larger_vocabulary():
    small, large = projection_of(ROWS), projection_of([*ROWS, {}], columns=7)
    assert small.padded(5, 7) == projection_of([*ROWS, {}], columns=7, vocab_sizes=(4, 6))
    assert small.padded(5, 7) != large
    assert small != ROWS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"vocab_sizes": (4, 4)}, "row 2 .* got 4; expected 0 to 3", id="column"),
        pytest.param({"vocab_sizes": (3, 6)}, "row 3 .* padding and not empty", id="row"),
        pytest.param({"vocab_sizes": (5, 6)}, "got 4 ids for 5 tokens", id="more tokens"),
        pytest.param({"vocab_sizes": (4, 7)}, "teacher's .* got 6 ids for 7", id="more columns"),
    ],
)
def test_padding_that_holds_mass_or_no_room_is_refused(fields, message):
    with pytest.raises(ProjectionError, match=message):
        projection_of(ROWS, **fields)


def test_a_size_below_the_vocabulary_is_refused():
    with pytest.raises(ProjectionError, match="got 3 ids for 4 tokens"):
        projection_of(ROWS).padded(3, 6)
    with pytest.raises(ProjectionError, match="got 5 ids for 6 tokens"):
        projection_of(ROWS).padded(4, 5)


@given(random_projections(), st.data())
@settings(deadline=None)
def test_a_row_that_does_not_sum_to_one_is_named(projection, data):
    filled = np.flatnonzero(projection.reachable_rows).tolist()
    assume(filled)
    bad = data.draw(st.sampled_from(filled))
    values = projection.values.copy()
    values[projection.indptr[bad]] += np.float32(data.draw(st.floats(1e-5, 1.0)))
    with pytest.raises(ProjectionError, match=f"row {bad} of the projection does not sum to 1"):
        dataclasses.replace(projection, values=values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"indptr": [1, 1, 1, 3, 4]}, "row 0 .* first entry; got 1", id="start"),
        pytest.param({"indptr": [0, 1, 0, 3, 4]}, "row 1 .* ends before it starts", id="falling"),
        pytest.param({"indptr": [0, 1, 1, 3, 3]}, "row 3 .* last entry; got 3", id="stop"),
        pytest.param({"indices": [0, 1, 6, 4]}, "row 2 .* got 6; expected 0 to 5", id="column"),
        pytest.param({"indices": [-1, 1, 4, 4]}, "row 0 .* outside", id="negative column"),
        pytest.param({"indices": [0, 4, 1, 4]}, "row 2 .* got 4 before 1", id="unsorted"),
        pytest.param({"indices": [0, 4, 4, 4]}, "row 2 .* got 4 before 4", id="repeated"),
        pytest.param({"values": [1, 1, 0, 1]}, "row 2 .* unusable share; got 0", id="zero"),
        pytest.param({"values": [1, 1.5, -0.5, 1]}, "row 2 .* got -0.5", id="negative"),
        pytest.param({"values": [1, np.nan, 1, 1]}, "row 2 .* got nan", id="nan"),
        pytest.param({"values": [np.inf, 0.5, 0.5, 1]}, "row 0 .* got inf", id="infinite"),
        pytest.param({"values": [1, 0.75, 0.25, 0.9]}, "row 3 .* does not sum to 1", id="sum"),
        pytest.param({"is_exact_row": [0, 1, 0, 0]}, "row 1 .* 0 entries", id="exact and empty"),
        pytest.param({"is_exact_row": [0, 0, 1, 0]}, "row 2 .* 2 entries", id="exact and shared"),
    ],
)
def test_the_first_bad_row_is_named(fields, message):
    good = projection_of(ROWS)
    arrays = {n: np.array(v, getattr(good, n).dtype) for n, v in fields.items()}
    with pytest.raises(ProjectionError, match=message):
        dataclasses.replace(good, **arrays)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"indptr": np.zeros(3, np.int64)}, r"indptr .* shape \(5,\)", id="few rows"),
        pytest.param({"indices": np.zeros(4, np.int64)}, "expected .* int32", id="wide ids"),
        pytest.param({"values": np.ones(4)}, "got .* float64", id="wide shares"),
        pytest.param({"values": np.ones(3, np.float32)}, r"shape \(4,\)", id="few shares"),
        pytest.param({"indices": [0, 1, 4, 4]}, "got .* list", id="list"),
        pytest.param({"is_exact_row": np.zeros(1, np.bool_)}, r"got shape \(1,\)", id="few flags"),
        pytest.param({"metadata": {"top_k": 4}}, "metadata of a projection is not text", id="int"),
    ],
)
def test_an_array_of_another_form_is_refused(fields, message):
    with pytest.raises(ProjectionError, match=message):
        dataclasses.replace(projection_of(ROWS), **fields)


def test_arrays_are_read_only_and_the_callers_stay_writable():
    values = np.array([1.0, 0.75, 0.25, 1.0], np.float32)
    projection = projection_of(ROWS, values=values)
    with pytest.raises(ValueError, match="read-only"):
        projection.values[0] = 0.5
    assert values.flags.writeable


def test_a_block_that_runs_backwards_is_refused():
    for cut in (projection_of(ROWS).row_block, projection_of(ROWS).column_block):
        with pytest.raises(ProjectionError, match=r"got \(3, 2\)"):
            cut(3, 2)


def test_what_is_made_of_a_projection_can_be_chained_and_saved_as_well():
    projection = projection_of([{0: 1.0}, {}, {1: 0.75, 2: 0.25}], columns=3)
    layout = VocabularyLayout.of(projection, rank_count=1, student_size=3, teacher_size=3)
    for made in (
        projection.padded(4, 5),
        projection.row_block(1, 3),
        projection.top_k(1),
        projection.permuted(layout),
        compose(projection, projection, top_k=1),
        fill_empty_rows(projection, projection),
        drop_padding(projection, (2, 2)),
        projection @ projection,
    ):
        assert type(made) is SparseProjection

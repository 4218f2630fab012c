"""What a projection is, and what it refuses to be."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection


def projection_of(rows, columns=6, **fields):
    """The projection of dicts of shares."""
    entries = [entry for row in rows for entry in sorted(row.items())]
    arrays = {
        "indptr": np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
        "indices": np.array([column for column, _ in entries], np.int32),
        "values": np.array([share for _, share in entries], np.float32),
        "shape": (len(rows), columns),
    }
    return SparseProjection(**{**arrays, **fields})


ROWS = [{0: 1.0}, {}, {1: 0.75, 4: 0.25}, {4: 1.0}]


@st.composite
def random_rows(draw):
    rows = []
    for size in draw(st.lists(st.integers(0, 5), max_size=6)):
        columns = draw(st.sets(st.integers(0, 5), min_size=size, max_size=size))
        weights = [draw(st.floats(1e-3, 1.0)) for _ in columns]
        rows.append({c: w / sum(weights) for c, w in zip(columns, weights, strict=True)})
    return rows


def dense(projection):
    matrix = np.zeros(projection.shape, np.float32)
    rows = np.repeat(np.arange(projection.shape[0]), np.diff(projection.indptr))
    matrix[rows, projection.indices] = projection.values
    return matrix


@given(random_rows())
@settings(deadline=None)
def test_normalised_rows_are_a_projection(rows):
    projection = projection_of(rows)
    matrix = dense(projection)
    assert projection.entry_count == np.count_nonzero(matrix)
    assert projection.empty_rows.tolist() == np.flatnonzero(~matrix.any(axis=1)).tolist()
    assert projection.reachable_columns.tolist() == matrix.any(axis=0).tolist()
    assert projection.is_exact_row.tolist() == [len(row) == 1 for row in rows]


@given(random_rows(), st.integers(0, 8), st.integers(0, 8))
@settings(deadline=None)
def test_a_row_block_is_those_rows_and_padding_rows_are_empty(rows, start, size):
    projection = projection_of(rows)
    block = projection.row_block(start, start + size)
    padded = np.zeros((16, 6), np.float32)
    padded[: len(rows)] = dense(projection)
    assert np.array_equal(dense(block), padded[start : start + size])
    assert block.shape == (size, 6)
    exact = [*projection.is_exact_row.tolist(), *[False] * 16][start : start + size]
    assert block.is_exact_row.tolist() == exact


@given(random_rows(), st.data())
@settings(deadline=None)
def test_a_row_that_does_not_sum_to_one_is_named(rows, data):
    filled = [at for at, row in enumerate(rows) if row]
    assume(filled)
    projection = projection_of(rows)
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


def test_a_row_of_one_entry_need_not_be_exact():
    is_exact_row = np.array([True, False, False, False])
    assert projection_of(ROWS, is_exact_row=is_exact_row).is_exact_row.tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_a_row_block_that_runs_backwards_is_refused():
    with pytest.raises(ProjectionError, match=r"got \(3, 2\)"):
        projection_of(ROWS).row_block(3, 2)


def test_blocks_of_a_padded_vocabulary_put_together_are_the_projection():
    projection = projection_of(ROWS)
    blocks = [dense(projection.row_block(start, start + 3)) for start in (0, 3, 6)]
    assert np.array_equal(np.concatenate(blocks)[:4], dense(projection))
    assert not np.concatenate(blocks)[4:].any()

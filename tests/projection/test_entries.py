"""Weighted pairs of tokens to a projection."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nearest_tokens import most_similar
from tests.projection.projection_rows import dense, rows_of

ENTRIES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.floats(0, 1e300)))


@given(ENTRIES)
@settings(deadline=None)
def test_repeated_pairs_are_added_up_and_rows_normalised(entries):
    rows, columns, weights = zip(*entries, strict=True) if entries else ((), (), ())
    rows, columns = np.array(rows, int), np.array(columns, int)
    projection = SparseProjection.from_entries(rows, columns, weights, (5, 7))
    expected = np.zeros((5, 7))
    for row, column, weight in entries:
        expected[row, column] += weight
    largest = expected.max(axis=1, keepdims=True)
    expected /= np.where(largest > 0, largest, 1.0)
    sums = expected.sum(axis=1, keepdims=True)
    expected /= np.where(sums > 0, sums, 1.0)
    np.testing.assert_allclose(dense(projection), expected, rtol=1e-6, atol=1e-37)


def test_a_pair_of_weight_zero_is_no_entry():
    projection = SparseProjection.from_entries([0, 0, 1], [1, 2, 0], [0, 2, 0], (2, 3))
    assert rows_of(projection) == [{2: 1.0}, {}]


def test_weights_of_any_size_are_shares():
    for scale in (5e-324, 1e-200, 1e308):
        projection = SparseProjection.from_entries([0, 0], [1, 2], [scale, scale], (1, 3))
        assert rows_of(projection) == [{1: 0.5, 2: 0.5}]


def test_rows_that_should_sum_to_one_already_are_checked():
    taken = SparseProjection.from_entries([0, 0], [2, 1], [0.25, 0.75], (1, 3), normalise=False)
    assert rows_of(taken) == [{1: 0.75, 2: 0.25}]
    with pytest.raises(
        ProjectionError, match=r"row 0 of the projection does not sum to 1; got 0.5"
    ):
        SparseProjection.from_entries([0], [1], [0.5], (1, 3), normalise=False)


def test_exact_rows_metadata_and_sizes_are_taken_over():
    projection = SparseProjection.from_entries(
        [0, 1],
        [1, 0],
        [3, 3],
        (4, 3),
        {"method": "mine"},
        vocab_sizes=(2, 2),
        is_exact_row=np.array([True, False, False, False]),
    )
    assert projection.is_exact_row.tolist() == [True, False, False, False]
    assert (projection.metadata, projection.vocab_sizes) == ({"method": "mine"}, (2, 2))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        pytest.param(([0, 1], [0], [1.0]), "differ in length; got .2,., .1,. and", id="lengths"),
        pytest.param(([[0]], [[0]], [[1.0]]), "differ in length", id="tables"),
        pytest.param(
            ([0.0], [0], [1.0]), "rows of a projection are not ids; got float64", id="rows"
        ),
        pytest.param(([0], [0.5], [1.0]), "columns of a projection are not ids", id="columns"),
        pytest.param(([0], [0], ["x"]), "weights of a projection are not numbers", id="text"),
        pytest.param(
            ([0], [0], torch.ones(1, requires_grad=True)), r"detach\(\)\.float\(\)", id="on a graph"
        ),
        pytest.param(
            ([0, 2], [0, 0], [1, 1]), "entry 1 .* row outside .* got 2; .* 0 to 1", id="r"
        ),
        pytest.param(([0], [-1], [1]), "entry 0 .* column outside .* got -1", id="negative"),
        pytest.param(([0], [3], [1]), "got 3; expected 0 to 2", id="column"),
        pytest.param(([0], [0], [np.nan]), "unusable weight; got nan", id="nan"),
        pytest.param(([0], [0], [np.inf]), "unusable weight; got inf", id="infinite"),
        pytest.param(([0], [0], [-1]), "unusable weight; got -1.0", id="below zero"),
    ],
)
def test_entries_that_make_no_sense_are_refused(entries, message):
    with pytest.raises(ProjectionError, match=message):
        SparseProjection.from_entries(*entries, (2, 3))


def test_similarity_counts_matching_characters_and_common_words():
    # Of 12 and 9 characters 8 match, in order; of the words {end, turn} and {end} one is common.
    found = most_similar("<end_of_turn", {7: "<end_turn"}, min_similarity=0.1, most=1)
    assert found == pytest.approx({7: 0.6 * 2 * 9 / 21 + 0.4 * 2 / 2})
    assert most_similar("<A>", {0: "<a>"}, min_similarity=0.1, most=1) == pytest.approx({0: 0.6})


def test_equal_names_of_words_are_wholly_similar():
    found = most_similar("<|image|>", {3: "<|image|>"}, min_similarity=1.0, most=4)
    assert found == pytest.approx({3: 1.0})


def test_the_most_similar_come_first_and_of_equals_the_lowest_id():
    names = {9: "<end>", 4: "<end>", 2: "<ends>", 1: "(pad)"}
    found = most_similar("<end>", names, min_similarity=0.5, most=2)
    assert list(found) == [4, 2]


def test_numbered_names_count_once():
    names = {i: f"<unused{i}>" for i in range(6000)}
    found = most_similar("<|reserved_7|>", {**names, 9000: "<reserved>"}, min_similarity=0, most=9)
    assert sorted(found) == [0, 9000]


def test_names_below_the_threshold_are_left_out():
    assert most_similar("<pad>", {0: "[[QQ]]"}, min_similarity=0.3, most=4) == {}

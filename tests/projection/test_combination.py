"""Projections through a pivot, filled, and without padding."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection, combination, compose, drop_padding
from megatron_ext.projection import fill_empty_rows as fill
from tests.projection.greedy_tokenizer import GreedyTokenizer
from tests.projection.projection_rows import dense, projection_of, random_projections, rows_of

STUDENT = GreedyTokenizer([b"ab", b"c", b"abc", b"z"])
PIVOT = GreedyTokenizer([b"a", b"b", b"c", b"bc"])
TEACHER = GreedyTokenizer([b"c", b"b", b"a"])


def build(student, teacher, **options):
    return SparseProjection.from_tokenizers(student, teacher, **options)


def normalised(matrix):
    sums = matrix.sum(axis=1, keepdims=True)
    return matrix / np.where(sums > 0, sums, 1.0)


@pytest.mark.parametrize("products_at_once", [3, 2**22])
@given(random_projections(), st.lists(random_projections(columns=4, max_rows=1), min_size=6))
@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_composition_is_the_normalised_product(monkeypatch, products_at_once, first, pivots):
    monkeypatch.setattr(combination, "PRODUCTS_AT_ONCE", products_at_once)
    second = projection_of([(rows_of(pivot) or [{}])[0] for pivot in pivots[:6]], 4)
    expected = normalised(dense(first).astype(np.float64) @ dense(second))
    np.testing.assert_allclose(dense(first @ second), expected, rtol=1e-6, atol=0)


def test_a_composition_of_tokenizers_spells_through_the_pivot():
    product = build(STUDENT, PIVOT) @ build(PIVOT, TEACHER)
    assert rows_of(product)[0] == pytest.approx({2: 10 / 11, 1: 1 / 11}, rel=1e-6)
    assert rows_of(product)[1] == {0: 1.0}
    assert rows_of(product)[3] == {}
    assert product.is_exact_row.tolist() == [False, True, False, False]
    assert product.vocab_sizes == product.shape == (4, 3)


def test_a_row_through_an_inexact_pivot_is_not_exact():
    first = projection_of([{0: 1.0}, {1: 1.0}], 2)
    second = projection_of([{0: 1.0}, {0: 1.0}], 2, is_exact_row=np.array([True, False]))
    assert (first @ second).is_exact_row.tolist() == [True, False]


def test_shares_of_pivot_tokens_that_stand_for_nothing_are_lost():
    first = projection_of([{0: 0.5, 1: 0.25, 2: 0.25}], 3)
    second = projection_of([{}, {0: 1.0}, {1: 1.0}], 2)
    assert rows_of(first @ second) == [{0: 0.5, 1: 0.5}]


def test_a_composition_keeps_the_largest_shares():
    first = projection_of([{0: 0.5, 1: 0.5}], 2)
    second = projection_of([{0: 0.25, 1: 0.75}, {1: 0.25, 2: 0.75}], 3)
    shares = rows_of(compose(first, second, top_k=2))[0]
    assert shares == pytest.approx({1: 4 / 7, 2: 3 / 7}, rel=1e-6)


def test_a_composition_says_of_which_pair_it_is():
    metadata = compose(build(STUDENT, PIVOT), build(PIVOT, TEACHER), top_k=2).metadata
    assert metadata["method"] == "composition"
    assert metadata["student_fingerprint"] == STUDENT.fingerprint()
    assert metadata["teacher_fingerprint"] == TEACHER.fingerprint()
    assert json.loads(metadata["options"]) == {
        "of": ["retokenized", "retokenized"],
        "pivot_fingerprint": PIVOT.fingerprint(),
        "top_k": 2,
    }


def test_padding_of_the_pivot_is_no_hindrance():
    first, second = build(STUDENT, PIVOT), build(PIVOT, TEACHER)
    padded = first.padded(8, 6) @ second.padded(7, 9)
    assert padded.shape == (8, 9)
    assert padded.padded(4, 3) == first @ second


def test_another_pivot_is_refused():
    other = GreedyTokenizer([b"a", b"b", b"c", b"x"])
    with pytest.raises(
        ProjectionError, match=r"student of the second .* not the teacher of the fi"
    ):
        build(STUDENT, PIVOT) @ build(other, TEACHER)
    with pytest.raises(ProjectionError, match=r"got 2 tokens, .* expected 3 tokens"):
        projection_of([{0: 1.0}], 3) @ projection_of([{}, {}], 3)
    with pytest.raises(TypeError, match="unsupported operand"):
        build(STUDENT, PIVOT) @ [1.0]
    with pytest.raises(ProjectionError, match=r"top_k leaves no entry"):
        compose(build(STUDENT, PIVOT), build(PIVOT, TEACHER), top_k=0)


def test_empty_rows_are_filled_and_others_stay():
    exact, spelled = build(STUDENT, PIVOT, method="exact"), build(STUDENT, PIVOT, decay=0.5)
    filled = fill(exact, spelled)
    assert rows_of(exact)[:2] == [{}, {2: 1.0}]
    assert rows_of(filled) == rows_of(spelled)
    assert filled.is_exact_row.tolist() == spelled.is_exact_row.tolist()
    assert filled.metadata["method"] == "exact"
    assert json.loads(filled.metadata["history"]) == [
        {"step": "fill_empty_rows", "method": "retokenized", "rows": 2}
    ]
    first_piece = build(STUDENT, PIVOT, method="first_piece")
    assert rows_of(fill(first_piece, spelled)) == rows_of(first_piece)


def test_only_a_projection_of_the_same_pair_fills():
    with pytest.raises(ProjectionError, match=r"teacher of the second .* not the teacher of the"):
        fill(build(STUDENT, PIVOT), build(STUDENT, TEACHER))


def test_mass_on_padding_is_dropped_and_rows_are_normalised():
    projection = projection_of([{0: 0.5, 5: 0.5}, {5: 1.0}, {1: 1.0}, {2: 1.0}], 6)
    dropped = drop_padding(projection, (3, 5))
    assert rows_of(dropped) == [{0: 1.0}, {}, {1: 1.0}, {}]
    assert (dropped.shape, dropped.vocab_sizes) == ((4, 6), (3, 5))
    assert dropped.is_exact_row.tolist() == [False, False, True, False]
    assert json.loads(dropped.metadata["history"]) == [
        {"step": "drop_padding", "vocab_sizes": [3, 5]}
    ]
    with pytest.raises(ProjectionError, match=r"smaller teacher vocabulary; got 7; expected 6"):
        drop_padding(projection, (3, 7))

"""Common and uncommon tokens."""

import runpy
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection, fill_empty_rows
from tests.projection.projection_rows import projection_of, random_projections


def ids(partition):
    return [
        getattr(partition, name).tolist()
        for name in ("common_student", "common_teacher", "uncommon_student", "uncommon_teacher")
    ]


def test_exact_rows_are_common():
    rows = [{2: 1.0}, {}, {1: 0.9, 3: 0.1}, {0: 1.0}, {3: 1.0}]
    is_exact_row = np.array([True, False, False, True, False])
    partition = projection_of(rows, 4, is_exact_row=is_exact_row).partition()
    assert ids(partition) == [[0, 3], [2, 0], [1, 2, 4], [1, 3]]
    assert partition.common_student.dtype == partition.uncommon_teacher.dtype == np.int64


def test_of_exact_rows_with_one_column_the_lowest_student_id_is_common():
    assert ids(projection_of([{1: 1.0}, {1: 1.0}, {0: 1.0}], 2).partition()) == [
        [0, 2],
        [1, 0],
        [1],
        [],
    ]


def test_with_a_least_share_the_largest_share_is_common_and_of_equals_the_lowest_id():
    rows = [{1: 0.75, 2: 0.25}, {1: 0.875, 0: 0.125}, {1: 0.875, 2: 0.125}, {2: 0.625, 3: 0.375}]
    projection = projection_of(rows, 4)
    assert ids(projection.partition(0.7)) == [[1], [1], [0, 2, 3], [0, 2, 3]]
    assert ids(projection.partition(0.625)) == [[1, 3], [1, 2], [0, 2], [0, 3]]
    assert ids(projection.partition(1.0)) == [[], [], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_padding_is_in_no_part():
    projection = projection_of([{2: 1.0}, {}], 3).padded(5, 7)
    assert ids(projection.partition()) == [[0], [2], [1], [0, 1]]


def test_a_projection_of_nothing_has_no_common_token():
    assert ids(projection_of([{}, {}], 2).partition()) == [[], [], [0, 1], [0, 1]]


@given(random_projections(), st.one_of(st.none(), st.floats(0.01, 1.0)))
@settings(deadline=None)
def test_every_token_is_in_one_part_once(projection, min_share):
    student_common, teacher_common, student_rest, teacher_rest = ids(
        projection.partition(min_share)
    )
    assert sorted(student_common + student_rest) == list(range(projection.shape[0]))
    assert sorted(teacher_common + teacher_rest) == list(range(projection.shape[1]))
    assert len(student_common) == len(teacher_common)


@pytest.mark.parametrize("share", [0, 1.5, float("nan"), -0.1])
def test_a_share_that_no_token_can_have_is_refused(share):
    with pytest.raises(ProjectionError, match=r"min_share: the least share .* cannot be used"):
        projection_of([{}]).partition(share)


SIZE = 200_000
"""Rows and columns: a dense matrix would be 149 GiB."""


@pytest.fixture(scope="module")
def projection():
    generator = np.random.default_rng(0)
    rows = np.repeat(np.arange(SIZE), 3)
    columns = generator.integers(0, SIZE, 3 * SIZE)
    return SparseProjection.from_entries(rows, columns, generator.random(3 * SIZE), (SIZE, SIZE))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda p: p.top_k(2), id="top_k"),
        pytest.param(lambda p: p.transpose(), id="transpose"),
        pytest.param(lambda p: p.column_block(0, SIZE // 2), id="column block"),
        pytest.param(lambda p: p.row_block(0, SIZE), id="row block"),
        pytest.param(lambda p: p.partition(0.5), id="partition"),
        pytest.param(lambda p: p.padded(SIZE + 7, SIZE + 9), id="padding"),
        pytest.param(lambda p: p @ p, id="composition"),
        pytest.param(lambda p: fill_empty_rows(p, p), id="filling"),
    ],
)
def test_memory_grows_with_the_entries(projection, operation):
    tracemalloc.start()
    operation(projection)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 600,000 entries, or 1,800,000 products of two, of up to some 200 bytes each.
    assert peak < 400 * 2**20


SCRIPT = Path(__file__).parents[2] / "docs" / "generate_projection_figures.py"


def test_the_table_of_pairs_is_current():
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text(encoding="utf-8") == script["projection_page"](), (
        "run: python docs/generate_projection_figures.py"
    )

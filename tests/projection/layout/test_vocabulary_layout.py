"""Orders of two vocabularies in which common tokens are side by side."""

import dataclasses

import numpy as np
import pytest

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import LayoutStatistics, VocabularyLayout, VocabularyOrder
from tests.projection.layout.random_pairs import random_pair

RANKS = [1, 2, 4, 8]


def layout_of(projection, ranks, padding=16):
    sizes = [-(-size // padding) * padding for size in projection.vocab_sizes]
    return VocabularyLayout.of(
        projection, rank_count=ranks, student_size=sizes[0], teacher_size=sizes[1]
    )


def local(order, rank):
    return order.ids[rank * order.width : (rank + 1) * order.width]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", range(5))
def test_both_orders_are_permutations_that_leave_the_padding_in_place(seed, ranks):
    projection = random_pair(seed)
    layout = layout_of(projection, ranks)
    for order, size in zip((layout.student, layout.teacher), (96, 128), strict=True):
        assert np.array_equal(np.sort(order.ids), np.arange(size))
        assert np.array_equal(order.places[order.ids], np.arange(size))
        assert np.array_equal(order.ids[order.vocab_size :], np.arange(order.vocab_size, size))
        assert order.width == size // ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", range(5))
def test_common_tokens_are_side_by_side_at_the_start_of_each_rank(seed, ranks):
    projection = random_pair(seed)
    layout = layout_of(projection, ranks)
    partition = projection.partition()
    pairs = set(
        zip(partition.common_student.tolist(), partition.common_teacher.tolist(), strict=True)
    )
    found = [
        (int(student), int(teacher))
        for rank, count in enumerate(layout.common_counts)
        for student, teacher in zip(
            local(layout.student, rank)[:count], local(layout.teacher, rank)[:count], strict=True
        )
    ]
    assert len(found) == len(set(found))
    assert set(found) <= pairs
    # All that the room for them allows: here no rank is too narrow for its share.
    assert len(found) == len(pairs)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_has_common_then_residual_then_other_tokens(ranks):
    projection = random_pair(1)
    layout = layout_of(projection, ranks)
    for order, has_entry in (
        (layout.student, projection.reachable_rows),
        (layout.teacher, projection.reachable_columns),
    ):
        for rank, count in enumerate(layout.common_counts):
            tokens = local(order, rank)
            rest = tokens[(tokens < order.vocab_size)][count:]
            assert not (np.diff(has_entry[rest].astype(int)) > 0).any()


def test_common_pairs_whose_column_another_row_has_come_last_of_the_common():
    projection = random_pair(2)
    layout = layout_of(projection, 2)
    degree = np.bincount(projection.indices, minlength=120)
    for rank, count in enumerate(layout.common_counts):
        shared = degree[local(layout.teacher, rank)[:count]] > 1
        assert not (np.diff(shared.astype(int)) < 0).any()
    assert (degree > 1).sum() > 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_only_columns_that_would_join_more_than_a_share_are_entered_from_other_ranks(ranks):
    # Stars: each spelled token begins with one of eight, and nothing else joins them.
    rows, columns = np.arange(120), np.concatenate([np.arange(80), np.arange(40) % 8])
    projection = SparseProjection.from_entries(
        rows, columns, np.ones(120), (120, 80), is_exact_row=rows < 80
    )
    layout = VocabularyLayout.of(projection, rank_count=ranks, student_size=128, teacher_size=88)
    statistics = LayoutStatistics.of(projection, layout)
    assert statistics.share_within == 1.0
    assert statistics.crossing_columns == 0
    assert statistics.residual_balance == 1.0
    # One column that a third of all spelled tokens have is too large for a rank of four.
    columns[80:] = np.where(np.arange(40) % 3 == 0, 5, 10 + np.arange(40) % 7)
    projection = SparseProjection.from_entries(
        rows, columns, np.ones(120), (120, 80), is_exact_row=rows < 80
    )
    layout = VocabularyLayout.of(projection, rank_count=4, student_size=128, teacher_size=88)
    statistics = LayoutStatistics.of(projection, layout)
    assert statistics.crossing_columns == 1
    crossing = layout.student.rank_of(rows) != layout.teacher.rank_of(columns)
    assert set(columns[crossing]) == {5}


def test_a_layout_is_the_same_every_time():
    projection = random_pair(3)
    assert layout_of(projection, 4) == layout_of(projection, 4)
    assert layout_of(projection, 4) != layout_of(projection, 2)


def test_common_tokens_that_no_rank_has_room_for_are_apart():
    # 17 of 32 student rows leave one token for the second rank, 24 teacher rows twelve for each.
    ids = np.arange(17)
    projection = SparseProjection.from_entries(ids, ids, np.ones(17), (17, 24))
    layout = VocabularyLayout.of(projection, rank_count=2, student_size=32, teacher_size=24)
    assert layout.common_counts == (12, 1)
    statistics = LayoutStatistics.of(projection, layout)
    assert (statistics.common_within, statistics.common) == (13, 17)
    assert statistics.entries_within == 13


def test_a_rank_of_padding_alone_holds_nothing():
    ids = np.arange(5)
    projection = SparseProjection.from_entries(ids, ids[::-1], np.ones(5), (5, 6))
    layout = VocabularyLayout.of(projection, rank_count=4, student_size=32, teacher_size=8)
    assert layout.common_counts == (2, 0, 0, 0)
    assert LayoutStatistics.of(projection, layout).entries_within == 2 + 0


def test_a_projection_without_common_tokens_has_a_layout():
    projection = SparseProjection.from_entries(
        [0], [2], [1], (3, 4), is_exact_row=np.zeros(3, bool)
    )
    layout = VocabularyLayout.of(projection, rank_count=2, student_size=4, teacher_size=4)
    assert layout.common_counts == (0, 0)
    assert LayoutStatistics.of(projection, layout).share_within == 1.0


def test_several_teachers_share_one_order_of_the_student():
    first, second = random_pair(4), random_pair(5, teachers=150, common=60)
    both = [projection.partition().common_student for projection in (first, second)]
    in_every = np.intersect1d(*both)
    assert 10 < len(in_every) < 50
    layouts = VocabularyLayout.of_several(
        [first, second], rank_count=2, student_size=96, teacher_sizes=[128, 160]
    )
    assert layouts[0].student == layouts[1].student
    for layout in layouts:
        found = [
            local(layout.student, rank)[:count] for rank, count in enumerate(layout.common_counts)
        ]
        assert set(in_every) <= set(np.concatenate(found).tolist())
    assert sum(layouts[0].common_counts) == len(both[0])
    # Every common token of the second is on its partner's rank, whatever its place.
    partition = second.partition()
    ranks = layouts[1].student.rank_of(partition.common_student)
    assert np.array_equal(ranks, layouts[1].teacher.rank_of(partition.common_teacher))


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((95, 128), 2), ((80, 128), 2), ((96, 112), 1), ((96, 128), 0)]
)
def test_heads_that_cannot_hold_the_vocabularies_are_refused(sizes, ranks):
    with pytest.raises(ProjectionError, match="a head cannot be laid out over its ranks"):
        VocabularyLayout.of(
            random_pair(0), rank_count=ranks, student_size=sizes[0], teacher_size=sizes[1]
        )


@pytest.mark.parametrize("ids", [[0, 1, 1, 3], [0, 1, 2, 4], [3, 0, 1, 2], [0, -1, 1, 3]], ids=str)
def test_what_is_no_permutation_of_the_tokens_is_refused(ids):
    with pytest.raises(ProjectionError, match="not a permutation that leaves its padding in place"):
        VocabularyOrder(ids=np.array(ids), vocab_size=3, rank_count=2)


def test_sides_of_different_ranks_are_refused():
    layout = layout_of(random_pair(0), 2)
    with pytest.raises(ProjectionError, match="do not fit together"):
        dataclasses.replace(layout, common_counts=(1, 2, 3))

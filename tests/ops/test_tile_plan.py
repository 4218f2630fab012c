"""Tiles hold whole chunks, every used row once, and no more rows than they must."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import LossError
from megatron_ext.ops.tile_plan import Tile, TilePlan


def ordered_chunks(chunk_sizes, gaps):
    """Chunk ids of both sides: before chunk c, ``gaps[c]`` rows of no chunk."""
    sides = ([], [])
    for chunk, sizes in enumerate(chunk_sizes):
        for side, size, gap in zip(sides, sizes, gaps[chunk], strict=True):
            side.extend([-1] * gap + [chunk] * size)
    return torch.tensor(sides[0], dtype=torch.int64), torch.tensor(sides[1], dtype=torch.int64)


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))
gaps = st.tuples(st.integers(0, 5), st.integers(0, 5))


@given(st.lists(st.tuples(sizes, gaps), max_size=12), st.integers(1, 9), st.booleans())
def test_tiles_cover_every_used_row_once_in_whole_chunks(chunks, rows, all_used):
    student, teacher = ordered_chunks([s for s, _ in chunks], [g for _, g in chunks])
    used = None if all_used else torch.arange(len(student)) % 3 == 0
    plan = TilePlan.of(student, teacher, len(chunks), rows=rows, student_used=used)
    wanted = torch.ones_like(student, dtype=torch.bool) if used is None else used | (student >= 0)
    assert torch.equal(plan.student_rows, wanted.nonzero()[:, 0])
    assert torch.equal(plan.teacher_rows, (teacher >= 0).nonzero()[:, 0])
    for side in ("student", "teacher", "chunks"):
        ranges = [getattr(tile, side) for tile in plan.tiles]
        ends = [0, *(part.stop for part in ranges)]
        assert [part.start for part in ranges] == ends[:-1]
    assert sum(tile.student_count for tile in plan.tiles) == len(plan.student_rows)
    assert sum(tile.teacher_count for tile in plan.tiles) == len(plan.teacher_rows)
    for tile in plan.tiles:
        own = plan.student_chunk_id[tile.student]
        other = plan.teacher_chunk_id[tile.teacher]
        inside = set(range(tile.chunks.start, tile.chunks.stop))
        assert set(own[own >= 0].tolist()) == set(other.tolist()) == inside
        # Longer than asked for only where it is one chunk, with rows of no chunk on neither side.
        if tile.student_count > rows or tile.teacher_count > rows:
            assert tile.chunk_count == 1


def test_tiles_are_as_few_as_may_be():
    student, teacher = ordered_chunks([(2, 1)] * 10, [(0, 0)] * 10)
    plan = TilePlan.of(student, teacher, 10, rows=6)
    assert [tile.student_count for tile in plan.tiles] == [6, 6, 6, 2]
    assert [tile.teacher_count for tile in plan.tiles] == [3, 3, 3, 1]
    assert plan.largest == (6, 3)


def test_chunks_that_interleave_share_a_tile():
    # On the student's side, and by another order on the teacher's.
    interleaved = torch.tensor([0, 1, 0, 1, 2, 3])
    crossed = torch.tensor([0, 0, 1, 1, 3, 2])
    plan = TilePlan.of(interleaved, crossed, 4, rows=1)
    assert [tile.student_count for tile in plan.tiles] == [4, 2]
    assert [tile.chunks for tile in plan.tiles] == [slice(0, 2), slice(2, 4)]


def test_chunks_are_ordered_by_their_first_student_row():
    plan = TilePlan.of(torch.tensor([[2, -1, 0], [1, 1, -1]]), torch.tensor([2, 0, 1]), 3, rows=2)
    assert plan.chunks.tolist() == [2, 0, 1]
    assert plan.student_chunk_id.tolist() == [0, -1, 1, 2, 2, -1]
    assert plan.teacher_chunk_id.tolist() == [0, 1, 2]
    assert [tile.chunk_count for tile in plan.tiles] == [1, 1, 1, 0]


def test_rows_without_chunks_are_cut_anywhere():
    nowhere = torch.full((10,), -1)
    plan = TilePlan.of(nowhere, nowhere, 0, rows=4)
    assert [tile.student_count for tile in plan.tiles] == [4, 4, 2]
    assert len(plan.teacher_rows) == 0


def test_without_a_used_row_there_is_an_empty_tile():
    nowhere, none_used = torch.full((10,), -1), torch.zeros(10, dtype=torch.bool)
    for plan in (
        TilePlan.of(nowhere, nowhere, 0, rows=4, student_used=none_used),
        TilePlan.paired(none_used, rows=4),
    ):
        assert plan.tiles == (Tile(slice(0, 0), slice(0, 0), slice(0, 0)),)


def test_a_tile_has_the_rows_behind_its_chunks():
    # Three chunks follow one another, then a row without, then one more of another text.
    student = torch.tensor([0, 0, 1, 2, -1, 3])
    teacher = torch.tensor([0, 1, 1, 2, -1, 3])
    own = torch.tensor([False, False, True, True, True, False])
    its = torch.tensor([False, True, False, True, False, False])
    plan = TilePlan.of(student, teacher, 4, rows=2, student_used=student >= 0, behind=(own, its))
    assert plan.student_rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.teacher_rows.tolist() == [0, 1, 2, 3, 5]
    assert [tile.chunks for tile in plan.tiles] == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 3),
        slice(3, 4),
    ]
    # The first two tiles end with a row of the next one; the third has a row of no chunk.
    assert [tile.student for tile in plan.tiles] == [
        slice(0, 3),
        slice(2, 4),
        slice(3, 5),
        slice(5, 6),
    ]
    assert [tile.teacher for tile in plan.tiles] == [
        slice(0, 2),
        slice(1, 4),
        slice(3, 4),
        slice(4, 5),
    ]
    assert [tile.shares_last for tile in plan.tiles] == [True, True, False, False]


def test_a_plan_of_pairs_has_the_same_rows_on_both_sides():
    plan = TilePlan.paired(torch.tensor([[True, False, True], [True, True, True]]), rows=2)
    assert plan.student_rows.tolist() == plan.teacher_rows.tolist() == [0, 2, 3, 4, 5]
    assert [tile.teacher for tile in plan.tiles] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert plan.student_total == plan.teacher_total == 6


def test_planning_takes_a_moment():
    ids = torch.arange(1 << 20)
    begin = time.perf_counter()
    assert len(TilePlan.of(ids, ids, len(ids), rows=2048).tiles) == 512
    # A fraction of a second; a quadratic search would take hours.
    assert time.perf_counter() - begin < 10


@pytest.mark.parametrize(
    ("student", "teacher", "count", "rows", "match"),
    [
        ([0, 1], [0, 1], 2, 0, "no row"),
        ([0, 2], [0, 1], 2, 4, "not counted"),
        ([0, 1], [0, 0], 2, 4, "chunk 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(student, teacher, count, rows, match):
    with pytest.raises(LossError, match=match):
        TilePlan.of(torch.tensor(student), torch.tensor(teacher), count, rows=rows)

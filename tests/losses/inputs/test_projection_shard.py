"""A projection cut to the columns of a rank, padded or in the order of a layout."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ProjectionError
from megatron_ext.losses import ProjectionShard
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import LayoutStatistics, VocabularyLayout
from tests.losses.microbatch import csr_arrays, projection_shard
from tests.ops.kernel_case import vocab_shard
from tests.ops.projected_kl_case import random_projection
from tests.projection.layout.random_pairs import random_pair

DENSE = random_projection(37, 23).float()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_shards_rows_and_columns_put_together_are_the_projection(ranks: int) -> None:
    shards = []
    for rank in range(ranks):
        student = vocab_shard(37, 15, rank, ranks, None)
        shards.append(projection_shard(DENSE, student, vocab_shard(23, 5, rank, ranks, None)))
    rows = torch.cat([shard.weight.to_dense() for shard in shards])
    assert torch.equal(rows[:37], DENSE)
    assert not rows[37:].any()
    columns = torch.cat([shard.weight_transposed.to_dense() for shard in shards], dim=1)
    assert torch.equal(columns, rows.t())
    assert torch.equal(torch.cat([shard.row_mass for shard in shards]), rows.sum(dim=1))
    reachable = torch.cat([shard.reachable for shard in shards])
    assert torch.equal(reachable[:23], DENSE.any(dim=0))
    assert not reachable[23:].any()


def test_a_sparse_projection_is_cut_as_its_arrays_are_and_stays_as_it_was() -> None:
    indptr, indices, values = csr_arrays(DENSE)
    projection = SparseProjection(indptr, indices, values, (37, 23))
    student, teacher = vocab_shard(37, 0, 1, 2, None), vocab_shard(23, 0, 1, 2, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard = ProjectionShard.from_projection(
            projection, student_shard=student, teacher_shard=teacher
        )
    assert torch.equal(shard.weight.to_dense()[:18], DENSE[19:])
    shard.weight.values().mul_(2)
    assert np.array_equal(projection.values, values)


def _cut(**changes: Any) -> ProjectionShard:
    indptr, indices, values = csr_arrays(DENSE)
    whole: dict[str, Any] = {
        "indptr": indptr,
        "indices": indices,
        "values": values,
        "shape": (37, 23),
        "student_shard": VocabShard(start=0, stop=40, vocab_size=37),
        "teacher_shard": VocabShard(start=0, stop=24, vocab_size=23),
    }
    return ProjectionShard.from_csr(**(whole | changes))


def test_a_shard_of_another_vocabulary_is_refused_with_both_sizes() -> None:
    other = VocabShard(start=0, stop=40, vocab_size=40)
    with pytest.raises(ProjectionError, match="student vocabulary; got 37 tokens; expected 40"):
        _cut(student_shard=other)
    with pytest.raises(ProjectionError, match="teacher vocabulary; got 23 tokens; expected 40"):
        _cut(teacher_shard=other)


def test_arrays_that_are_no_matrix_are_refused() -> None:
    indptr, indices, values = csr_arrays(DENSE)
    with pytest.raises(ProjectionError, match="37 row pointers; expected 38"):
        _cut(indptr=indptr[:-1])
    with pytest.raises(ProjectionError, match="indices and values"):
        _cut(values=values[:-1])
    with pytest.raises(ProjectionError, match="columns 0 to 23; expected 0 to 22"):
        _cut(indices=np.where(np.arange(len(indices)) == 0, 23, np.minimum(indices, 0)))


def test_a_projection_that_maps_nothing_is_refused() -> None:
    empty = np.zeros(0, dtype=np.int32)
    with pytest.raises(ProjectionError, match="maps no token"):
        _cut(indptr=np.zeros(38, np.int64), indices=empty, values=empty.astype(np.float32))


def test_padding_of_a_projection_changes_nothing_of_a_shard():
    projection = SparseProjection.from_entries([0, 1, 1, 2], [2, 0, 1, 3], [1, 1, 3, 1], (3, 5))
    shards = {
        "student_shard": VocabShard(start=2, stop=4, vocab_size=3),
        "teacher_shard": VocabShard(start=3, stop=6, vocab_size=5),
    }
    plain = ProjectionShard.from_projection(projection, **shards)
    padded = ProjectionShard.from_projection(projection.padded(8, 8), **shards)
    assert plain.weight.to_dense().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    for name in ("weight", "weight_transposed", "row_mass", "reachable"):
        left, right = (getattr(shard, name) for shard in (plain, padded))
        left, right = (t.to_dense() if t.layout == torch.sparse_csr else t for t in (left, right))
        assert torch.equal(left, right)


SIZES = (96, 128)


def shard_of(projection: SparseProjection, rank: int, ranks: int) -> ProjectionShard:
    """One rank's piece; its collectives, of which it has none here, would be over all ranks."""
    shards = [
        VocabShard(
            start=rank * size // ranks, stop=(rank + 1) * size // ranks, vocab_size=vocab_size
        )
        for size, vocab_size in zip(SIZES, projection.vocab_sizes, strict=True)
    ]
    return ProjectionShard.from_projection(
        projection, student_shard=shards[0], teacher_shard=shards[1]
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_direct_pairs_are_the_first_columns_of_both_sides(seed: int, ranks: int) -> None:
    projection = random_pair(seed)
    layout = VocabularyLayout.of(
        projection, rank_count=ranks, student_size=SIZES[0], teacher_size=SIZES[1]
    )
    alone = np.bincount(projection.indices, minlength=SIZES[1]) == 1
    permuted = projection.permuted(layout)
    assert sum(layout.common_counts) >= 16
    for rank, common in enumerate(layout.common_counts):
        plan = shard_of(permuted, rank, ranks).plan
        start = rank * layout.teacher.width
        together = int(alone[layout.teacher.ids[start : start + common]].sum())
        direct = together // 16 * 16
        if not direct:
            assert plan.aligned is None
            continue
        assert (plan.direct_pairs, plan.aligned) == (direct, direct)
        assert torch.equal(plan.partner[:direct], torch.arange(direct, dtype=torch.int32))
        assert (plan.partner[direct:] < 0).all()
        assert plan.crossing == LayoutStatistics.of(projection, layout).crossing_columns


def test_far_fewer_columns_cross_than_in_the_order_of_ids() -> None:
    projection = random_pair(1)
    layout = VocabularyLayout.of(
        projection, rank_count=4, student_size=SIZES[0], teacher_size=SIZES[1]
    )
    crossing = []
    for ordered in (projection, projection.permuted(layout)):
        plan = shard_of(ordered, 0, 4).plan
        crossing.append(plan.crossing)
    assert crossing[1] < crossing[0] / 4

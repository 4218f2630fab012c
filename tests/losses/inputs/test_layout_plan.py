"""What kernels find in a projection whose vocabularies are in a layout's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import ProjectionShard
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import LayoutStatistics, VocabularyLayout
from tests.projection.layout.random_pairs import random_pair

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
    for rank, common in enumerate(layout.common_counts):
        plan = shard_of(permuted, rank, ranks).plan
        assert plan is not None
        start = rank * layout.teacher.width
        direct = int(alone[layout.teacher.ids[start : start + common]].sum())
        assert plan.direct_pairs == direct > 0
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
        assert plan is not None
        crossing.append(plan.crossing)
    assert crossing[1] < crossing[0] / 4

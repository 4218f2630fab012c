"""What of a projection lies on each tensor-parallel rank, and what of it crosses ranks."""

from __future__ import annotations

import numpy as np

from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.projection.layout.layout_statistics import LayoutStatistics
from megatron_ext.training.dry_run.model_shape import ModelShape
from megatron_ext.training.dry_run.plan import PairCost


def pair_cost(
    projection: SparseProjection, student: ModelShape, teacher: ModelShape, *, is_laid_out: bool
) -> PairCost:
    """The cost of a pair over the ranks of its heads.

    Args:
        is_laid_out: Whether the heads are in a layout's order (``training.vocabulary_layout``).
    """
    ranks = student.tp
    if is_laid_out:
        layout = VocabularyLayout.of(
            projection,
            rank_count=ranks,
            student_size=student.padded_vocab_size,
            teacher_size=teacher.padded_vocab_size,
        )
        statistics = LayoutStatistics.of(projection, layout)
        owner = layout.student.rank_of(projection.entry_rows)
        crossing = statistics.crossing_columns
    else:
        owner = projection.entry_rows // student.head_rows
        crosses = owner != projection.indices // teacher.head_rows
        crossing = len(np.unique(projection.indices[crosses]))
    return PairCost(
        entries=int(np.bincount(owner, minlength=ranks).max()), crossing_columns=crossing
    )

"""What a layout leaves to be exchanged between ranks. R ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.layout.vocabulary_layout import VocabularyLayout
from megatron_ext.projection.projection_matrix import ProjectionMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStatistics:
    """How a projection's entries lie under a layout."""

    common_within: int
    """Common pairs that lie side by side on a rank."""

    common: int
    """All common pairs."""

    entries_within: int
    """Entries whose two tokens are on one rank."""

    entries: int
    """All entries."""

    crossing_columns: int
    """Teacher tokens with an entry of another rank: what ranks have to exchange for each chunk."""

    common_balance: float
    """Most common pairs of a rank, over the mean."""

    residual_balance: float
    """Most entries of a rank that are in no common pair of its own, over the mean."""

    @classmethod
    def of(cls, projection: ProjectionMatrix, layout: VocabularyLayout) -> LayoutStatistics:
        """Statistics of ``projection``, in the tokenizers' order, under ``layout``."""
        ranks = layout.rank_count
        projection = projection.padded(*projection.vocab_sizes)
        owner = layout.student.rank_of(projection.entry_rows)
        column_owner = layout.teacher.rank_of(projection.indices)
        crosses = owner != column_owner
        counts = np.asarray(layout.common_counts)
        residual = np.bincount(owner, minlength=ranks) - counts
        return cls(
            common_within=int(counts.sum()),
            common=len(projection.partition().common_student),
            entries_within=int((~crosses).sum()),
            entries=projection.entry_count,
            crossing_columns=len(np.unique(projection.indices[crosses])),
            common_balance=_balance(counts),
            residual_balance=_balance(residual),
        )

    @property
    def share_within(self) -> float:
        """Share of the entries that no rank needs another for."""
        return self.entries_within / max(self.entries, 1)


def _balance(counts: NDArray[np.int64]) -> float:
    mean = counts.mean()
    return float(counts.max() / mean) if mean else 1.0

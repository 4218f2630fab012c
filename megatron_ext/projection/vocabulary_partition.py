"""Partition of two vocabularies into common and uncommon tokens.

C common tokens, Vs and Vt vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError

if TYPE_CHECKING:
    from megatron_ext.projection.layout import VocabularyLayout
    from megatron_ext.projection.projection_matrix import ProjectionMatrix

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPartition:
    """Common tokens in pairs, and the other tokens of both vocabularies, without padding.

    ``common_student[c]`` and ``common_teacher[c]`` are one token; no id is repeated.
    """

    common_student: Ids
    """[C] ascending."""

    common_teacher: Ids
    """[C]"""

    uncommon_student: Ids
    """[Vs - C] ascending."""

    uncommon_teacher: Ids
    """[Vt - C] ascending."""

    @classmethod
    def of(
        cls, projection: ProjectionMatrix, min_share: float | None = None
    ) -> VocabularyPartition:
        """Partition by a projection.

        Args:
            projection: Projection between the two vocabularies.
            min_share: None: exact rows are common. Otherwise every row whose largest share is at
                least this one, with the column of that share (of equals, the lowest).

        Where several rows have one column, it is common to the row of the largest share, and of
        equals to the lowest student id. The other rows are uncommon.

        Raises:
            ProjectionError: ``min_share`` is not above 0 and at most 1.
        """
        rows, columns, shares = _largest_shares(projection)
        if min_share is None:
            candidates = projection.is_exact_row[rows]
        elif 0 < min_share <= 1:
            candidates = shares >= np.float32(min_share)
        else:
            raise ProjectionError(
                "the least share of a common token cannot be used",
                got=min_share,
                expected="above 0 and at most 1, or None for exact rows",
                where="min_share",
            )
        rows, columns, shares = rows[candidates], columns[candidates], shares[candidates]
        order = np.lexsort((rows, -shares, columns))
        _, first = np.unique(columns[order], return_index=True)
        chosen = np.sort(order[first])
        real_rows, real_columns = projection.vocab_sizes
        return cls(
            common_student=rows[chosen],
            common_teacher=columns[chosen],
            uncommon_student=np.setdiff1d(np.arange(real_rows), rows[chosen]),
            uncommon_teacher=np.setdiff1d(np.arange(real_columns), columns[chosen]),
        )

    def permuted(self, layout: VocabularyLayout) -> VocabularyPartition:
        """Reorder the pairs from ids to places of a layout, the student's ascending.

        Raises:
            ProjectionError: ``layout`` is of vocabularies of other sizes.
        """
        layout.check_sizes(
            len(self.common_student) + len(self.uncommon_student),
            len(self.common_teacher) + len(self.uncommon_teacher),
        )
        student, teacher = layout.student.places, layout.teacher.places
        common = student[self.common_student]
        order = np.argsort(common)
        return VocabularyPartition(
            common_student=common[order],
            common_teacher=teacher[self.common_teacher][order],
            uncommon_student=np.sort(student[self.uncommon_student]),
            uncommon_teacher=np.sort(teacher[self.uncommon_teacher]),
        )


def _largest_shares(projection: ProjectionMatrix) -> tuple[Ids, Ids, NDArray[np.float32]]:
    """Every row that is not empty, with the column of its largest share and the share."""
    one_each = projection.top_k(1)
    rows = np.flatnonzero(np.diff(projection.indptr)).astype(np.int64)
    if not len(rows):
        return rows, rows, projection.values
    shares = np.maximum.reduceat(projection.values, projection.indptr[rows])
    return rows, one_each.indices.astype(np.int64), shares

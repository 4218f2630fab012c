"""What has to lie on one rank together. Vs Vt vocabularies, E entries beside the common pairs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.vocabulary_partition import VocabularyPartition

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ResidualGraph:
    """Tokens as items, joined by the projection's entries other than the common pairs.

    A common pair is one item, since both of its tokens go to one rank. Items are numbered by their
    student token, and those without one by ``Vs`` plus their teacher token.
    """

    row_item: Ids
    """[E] the item of each entry's student token."""

    column_item: Ids
    """[E] the item of its teacher token."""

    degree: Ids
    """[Vs + Vt] entries in an item's column."""

    student_items: Ids
    """[Vs + Vt] 1 for an item with a student token, else 0."""

    teacher_items: Ids
    """[Vs + Vt] 1 for an item with a teacher token, else 0."""

    @classmethod
    def of(cls, projection: ProjectionMatrix, partition: VocabularyPartition) -> ResidualGraph:
        """The graph of a projection without padding."""
        students, teachers = projection.vocab_sizes
        partner = np.full(students, -1, dtype=np.int64)
        partner[partition.common_student] = partition.common_teacher
        item_of_teacher = students + np.arange(teachers)
        item_of_teacher[partition.common_teacher] = partition.common_student
        rows, columns = projection.entry_rows, projection.indices.astype(np.int64)
        residual = partner[rows] != columns
        column_item = item_of_teacher[columns[residual]]
        has_teacher = np.zeros(students + teachers, dtype=np.int64)
        has_teacher[item_of_teacher] = 1
        return cls(
            row_item=rows[residual],
            column_item=column_item,
            degree=np.bincount(column_item, minlength=students + teachers),
            student_items=(np.arange(students + teachers) < students).astype(np.int64),
            teacher_items=has_teacher,
        )

    @property
    def work(self) -> Ids:
        """[Vs + Vt] entries in an item's row."""
        return np.bincount(self.row_item, minlength=len(self.degree))

    def grouped(self, rank_count: int) -> tuple[Ids, NDArray[np.bool_]]:
        """The component of each item [Vs + Vt], named by one of its items, and which are hubs.

        Columns join their rows to components, those of the fewest entries first. One that would
        make a component of more work than a rank's share is a hub instead: it joins nothing, and
        its entries may come from several ranks.
        """
        share = -(-len(self.row_item) // rank_count)
        weight = self.work.tolist()
        parent = list(range(len(weight)))
        is_hub = np.zeros(len(weight), dtype=np.bool_)
        order = np.lexsort((self.row_item, self.column_item, self.degree[self.column_item]))
        columns = self.column_item[order]
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        rows = self.row_item[order].tolist()
        bounds = [*starts.tolist(), len(rows)]
        for start, stop in pairwise(bounds):
            column = int(columns[start])
            roots = {_root(parent, item) for item in (column, *rows[start:stop])}
            joined = sum(weight[root] for root in roots)
            if joined > share:
                is_hub[column] = True
                continue
            top = min(roots)
            for root in roots:
                parent[root] = top
            weight[top] = joined
        return _flattened(np.array(parent, dtype=np.int64)), is_hub


def _root(parent: list[int], item: int) -> int:
    while parent[item] != item:
        # Halves the path for those who walk it next.
        parent[item] = item = parent[parent[item]]
    return item


def _flattened(parent: Ids) -> Ids:
    """The root of each item."""
    while not np.array_equal(above := parent[parent], parent):
        parent = above
    return parent

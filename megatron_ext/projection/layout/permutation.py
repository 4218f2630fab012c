"""A projection and its partition by places instead of ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.compressed_rows import row_pointers
from megatron_ext.projection.history import with_step
from megatron_ext.projection.layout.vocabulary_layout import VocabularyLayout
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.projection.vocabulary_partition import VocabularyPartition


def permuted_projection(projection: SparseProjection, layout: VocabularyLayout) -> SparseProjection:
    """See ``SparseProjection.permuted``."""
    students, teachers = projection.vocab_sizes
    _check((students, teachers), layout)
    rows = layout.student.places[projection.entry_rows]
    columns = layout.teacher.places[projection.indices]
    order = np.lexsort((columns, rows))
    is_exact_row = np.zeros(students, dtype=np.bool_)
    is_exact_row[layout.student.places[:students]] = projection.is_exact_row[:students]
    # The tokenizers know ids, so the result is of no pair that a file could be checked against.
    metadata = {
        name: text for name, text in projection.metadata.items() if "fingerprint" not in name
    }
    return SparseProjection(
        indptr=row_pointers(rows, students),
        indices=columns[order].astype(np.int32),
        values=projection.values[order],
        shape=(students, teachers),
        metadata=with_step(metadata, "permuted", ranks=layout.rank_count),
        is_exact_row=is_exact_row,
    )


def permuted_partition(
    partition: VocabularyPartition, layout: VocabularyLayout
) -> VocabularyPartition:
    """See ``VocabularyPartition.permuted``."""
    student, teacher = layout.student.places, layout.teacher.places
    _check(
        (
            len(partition.common_student) + len(partition.uncommon_student),
            len(partition.common_teacher) + len(partition.uncommon_teacher),
        ),
        layout,
    )
    common = student[partition.common_student]
    order = np.argsort(common)
    return replace(
        partition,
        common_student=common[order],
        common_teacher=teacher[partition.common_teacher][order],
        uncommon_student=np.sort(student[partition.uncommon_student]),
        uncommon_teacher=np.sort(teacher[partition.uncommon_teacher]),
    )


def _check(sizes: tuple[int, int], layout: VocabularyLayout) -> None:
    expected = (layout.student.vocab_size, layout.teacher.vocab_size)
    if sizes != expected:
        raise ProjectionError(
            "the vocabulary layout is of another pair",
            got=f"{sizes[0]} student and {sizes[1]} teacher tokens",
            expected=f"{expected[0]} and {expected[1]}",
            fix="make the layout of this projection: VocabularyLayout.of(projection, ...)",
        )

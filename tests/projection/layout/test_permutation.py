"""Projections and partitions by places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from tests.projection.layout.random_pairs import random_pair


def dense(projection: SparseProjection) -> np.ndarray:
    array = np.zeros(projection.shape, np.float32)
    array[projection.entry_rows, projection.indices] = projection.values
    return array


@pytest.fixture
def projection() -> SparseProjection:
    return random_pair(7)


@pytest.fixture
def layout(projection: SparseProjection) -> VocabularyLayout:
    return VocabularyLayout.of(projection, rank_count=2, student_size=96, teacher_size=128)


def test_a_permuted_projection_has_the_same_entries_elsewhere(
    projection: SparseProjection, layout: VocabularyLayout
) -> None:
    permuted = projection.permuted(layout)
    student, teacher = layout.student.ids[:90], layout.teacher.ids[:120]
    assert np.array_equal(dense(permuted), dense(projection)[np.ix_(student, teacher)])
    assert np.array_equal(permuted.is_exact_row, projection.is_exact_row[student])
    assert permuted.vocab_sizes == projection.vocab_sizes
    assert projection.padded(96, 128).permuted(layout) == permuted


def test_the_common_block_of_each_rank_is_a_diagonal(
    projection: SparseProjection, layout: VocabularyLayout
) -> None:
    matrix = dense(projection.permuted(layout).padded(96, 128))
    for rank, count in enumerate(layout.common_counts):
        block = matrix[rank * 48 : rank * 48 + count, rank * 64 : rank * 64 + count]
        assert np.array_equal(block, np.eye(count))
        assert count > 20


def test_a_permuted_partition_has_the_same_pairs(
    projection: SparseProjection, layout: VocabularyLayout
) -> None:
    partition = projection.partition()
    permuted = partition.permuted(layout)
    assert np.array_equal(permuted.common_student, np.sort(permuted.common_student))
    pairs = np.stack(
        [
            layout.student.ids[permuted.common_student],
            layout.teacher.ids[permuted.common_teacher],
        ]
    )
    expected = np.stack([partition.common_student, partition.common_teacher])
    assert np.array_equal(pairs[:, np.argsort(pairs[0])], expected)
    for side, order in (("student", layout.student), ("teacher", layout.teacher)):
        rest = getattr(permuted, f"uncommon_{side}")
        back = np.sort(order.ids[rest])
        assert np.array_equal(back, getattr(partition, f"uncommon_{side}"))


def test_a_file_of_places_is_of_no_tokenizer(
    projection: SparseProjection, layout: VocabularyLayout, tmp_path: Path
) -> None:
    class Named:
        vocab_size = 90

        def fingerprint(self) -> str:
            return "s7"

    assert projection.metadata["student_fingerprint"] == "s7"
    projection.permuted(layout).save(tmp_path / "places.safetensors")
    with pytest.raises(ProjectionError, match="built for another student"):
        SparseProjection.load(tmp_path / "places.safetensors", student=Named())  # type: ignore[arg-type]


def test_a_layout_of_another_pair_is_refused(layout: VocabularyLayout) -> None:
    other = random_pair(8, students=91)
    for what in (other, other.partition()):
        with pytest.raises(ProjectionError, match="the vocabulary layout is of another pair"):
            what.permuted(layout)

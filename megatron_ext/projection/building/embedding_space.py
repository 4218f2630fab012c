"""A space in which embeddings of two vocabularies can be compared.

C anchors, N rows of a block, Ds and Dt numbers of an embedding.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.building.embedding_matrix import EmbeddingMatrix, unit_rows

EmbeddingSpace = Literal["shared", "anchored"]

ANCHORS_AT_ONCE = 4096

Vectors = NDArray[np.float32]


class SharedSpace:
    """Both matrices come from one encoder: rows are compared as they are.

    Raises:
        ProjectionError: Matrices of different widths.
    """

    def __init__(self, student: EmbeddingMatrix, teacher: EmbeddingMatrix) -> None:
        if student.shape[1] != teacher.shape[1]:
            raise ProjectionError(
                "embeddings of different widths share no space",
                got=f"{student.shape[1]} and {teacher.shape[1]} numbers a token",
                fix='give embeddings of one encoder, or say space="anchored"',
            )

    def of_student(self, rows: Vectors) -> Vectors:
        """Unit vectors [N, D]."""
        return unit_rows(rows)

    def of_teacher(self, rows: Vectors) -> Vectors:
        """Unit vectors [N, D]."""
        return unit_rows(rows)


class AnchoredSpace:
    """The teacher's space, into which the student's is turned so that common tokens meet.

    The turn is the orthogonal Procrustes solution (Schönemann 1966) over unit vectors of the
    anchors, less their mean: of all maps that keep angles, the one that brings each pair nearest.

    Args:
        student: [Vs, Ds]
        teacher: [Vt, Dt]
        student_ids: [C] anchors of the student.
        teacher_ids: [C] the same tokens of the teacher.

    Raises:
        ProjectionError: Fewer than two anchors.
    """

    def __init__(
        self,
        student: EmbeddingMatrix,
        teacher: EmbeddingMatrix,
        student_ids: NDArray[np.int64],
        teacher_ids: NDArray[np.int64],
    ) -> None:
        if len(student_ids) < 2:
            raise ProjectionError(
                "too few tokens are common to both vocabularies to relate their embeddings",
                got=len(student_ids),
                expected="2 or more",
                fix='give embeddings of one encoder, and say space="shared"',
            )
        self._student_mean = _mean(student, student_ids)
        self._teacher_mean = _mean(teacher, teacher_ids)
        moments = np.zeros((student.shape[1], teacher.shape[1]))
        for start in range(0, len(student_ids), ANCHORS_AT_ONCE):
            block = slice(start, start + ANCHORS_AT_ONCE)
            rows = unit_rows(student.take(student_ids[block])) - self._student_mean
            moments += rows.T @ (unit_rows(teacher.take(teacher_ids[block])) - self._teacher_mean)
        left, _, right = np.linalg.svd(moments, full_matrices=False)
        self._turn = (left @ right).astype(np.float32)

    def of_student(self, rows: Vectors) -> Vectors:
        """Unit vectors [N, Dt] of the teacher's space."""
        return unit_rows((unit_rows(rows) - self._student_mean) @ self._turn)

    def of_teacher(self, rows: Vectors) -> Vectors:
        """Unit vectors [N, Dt]."""
        return unit_rows(unit_rows(rows) - self._teacher_mean)


def _mean(matrix: EmbeddingMatrix, ids: NDArray[np.int64]) -> Vectors:
    """Mean of the unit vectors of ``ids`` [D]."""
    total = np.zeros(matrix.shape[1])
    for start in range(0, len(ids), ANCHORS_AT_ONCE):
        total += unit_rows(matrix.take(ids[start : start + ANCHORS_AT_ONCE])).sum(axis=0)
    mean: Vectors = (total / len(ids)).astype(np.float32)
    return mean

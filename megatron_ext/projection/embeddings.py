"""Embeddings of a vocabulary, and a common space for those of two vocabularies.

V tokens, D numbers each (Ds and Dt of student and teacher), N rows of a block, C anchors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.files import parse_json

BFLOAT16: Final = "BF16"
_NUMPY_TYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", BFLOAT16: "<u2"}
_HEADER_LENGTH_BYTES: Final = 8


class EmbeddingMatrix:
    """Rows of embeddings as float32, from an array or a file.

    Args:
        source: An array [V, D] of floating-point numbers, or a safetensors file, of which only the
            rows asked for are read.
        tensor: Name of the tensor in the file; may be omitted where it has one matrix only.

    Raises:
        ProjectionError: No such file or tensor, or one that is no matrix of floating-point numbers.
    """

    def __init__(self, source: ArrayLike | str | Path, tensor: str | None = None) -> None:
        self._is_bfloat16 = False
        if isinstance(source, str | Path):
            self._where: object = source
            self._rows, self._is_bfloat16 = _mapped(Path(source), tensor)
        else:
            self._where = None
            self._rows = np.asarray(source)
        is_float = self._is_bfloat16 or np.issubdtype(self._rows.dtype, np.floating)
        if self._rows.ndim != 2 or not is_float:
            raise ProjectionError(
                "embeddings are not a matrix of floating-point numbers",
                where=self._where,
                got=f"shape {self._rows.shape} of {self._rows.dtype}",
                expected="one row a token",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)"""
        return self._rows.shape[0], self._rows.shape[1]

    def check_height(self, vocab_size: int, side: str) -> None:
        """Refuse a matrix with fewer rows than its vocabulary; more are padding.

        Raises:
            ProjectionError: It has fewer rows.
        """
        if self.shape[0] < vocab_size:
            raise ProjectionError(
                f"the {side}'s embeddings are of another vocabulary",
                where=self._where,
                got=f"{self.shape[0]} rows",
                expected=f"{vocab_size} or more",
            )

    def take(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of ``ids`` [N, D].

        Raises:
            ProjectionError: A row with a number that is not finite.
        """
        rows: NDArray[Any] = self._rows[ids]
        if self._is_bfloat16:
            # bfloat16 is the upper half of a float32.
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        rows = np.asarray(rows, dtype=np.float32)
        bad = ~np.isfinite(rows).all(axis=1)
        if bad.any():
            raise ProjectionError(
                f"the embedding of id {ids[int(np.argmax(bad))]} is not finite", where=self._where
            )
        return rows


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale ``rows`` [N, D] to length 1; a row of zeros stays."""
    # Squares of numbers near 1e38 overflow in float32.
    lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))[:, None]
    unit: NDArray[np.float32] = (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return unit


def _mapped(path: Path, tensor: str | None) -> tuple[NDArray[Any], bool]:
    """Memory-mapped matrix of a file, and whether it is bfloat16.

    The format is that of https://github.com/huggingface/safetensors: a length, a JSON header, data.
    numpy has no bfloat16, for which the library would need torch.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            size = path.stat().st_size
            header = parse_json(file.read(length)) if length <= size else None
    except (OSError, ValueError) as error:
        raise ProjectionError("the embeddings cannot be read", where=path, got=error) from error
    if not isinstance(header, dict):
        raise ProjectionError("the embeddings are in no whole safetensors file", where=path)
    entry = _entry(path, header, tensor)
    shape: tuple[int, int] = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    dtype: np.dtype[Any] = np.dtype(_NUMPY_TYPES[entry["dtype"]])
    offset = _HEADER_LENGTH_BYTES + length + begin
    if end - begin != shape[0] * shape[1] * dtype.itemsize or offset + end - begin > size:
        raise ProjectionError("the embeddings are in no whole safetensors file", where=path)
    mapped: NDArray[Any] = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
    return mapped, entry["dtype"] == BFLOAT16


def _entry(path: Path, header: dict[str, Any], tensor: str | None) -> dict[str, Any]:
    """Header's entry of the requested matrix."""
    matrices = {
        name: entry
        for name, entry in header.items()
        if name != "__metadata__"
        and len(entry.get("shape", ())) == 2
        and entry.get("dtype") in _NUMPY_TYPES
    }
    if tensor is None and len(matrices) == 1:
        tensor = next(iter(matrices))
    if tensor not in matrices:
        raise ProjectionError(
            "there is no such matrix of embeddings",
            where=path,
            got=repr(tensor),
            expected=f"one of {', '.join(matrices) or 'none'}",
            fix="name the tensor",
        )
    entry: dict[str, Any] = matrices[tensor]
    return entry


EmbeddingSpace = Literal["shared", "anchored"]

ANCHORS_AT_ONCE = 4096

Vectors = NDArray[np.float32]


class SharedSpace:
    """Space of two matrices from one encoder: rows are compared as they are.

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
    """Teacher's space, with the student's rotated into it so that common tokens coincide.

    The rotation is the orthogonal Procrustes solution (Schönemann 1966) over unit vectors of the
    anchors, less their mean: of all maps that keep angles, the one that brings the pairs nearest.

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

"""Builder of a projection from embeddings of two vocabularies.

Vs Vt vocabularies, D numbers of an embedding, N student rows and M teacher rows at once, K top-k.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.builder import emitted_tokens, identity
from megatron_ext.projection.compressed_rows import Entries, check_top_k, concatenated
from megatron_ext.projection.embeddings import (
    AnchoredSpace,
    EmbeddingMatrix,
    EmbeddingSpace,
    SharedSpace,
)
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.projection.speller import Speller
from megatron_ext.tokenizers.base import ByteTokenizer

ROWS_AT_ONCE = 1024
COLUMNS_AT_ONCE = 4096
"""Teacher rows of a block: 16 MiB of cosines, 64 MiB of embeddings of 4,096 numbers."""

SHARPNESS = 10.0

Source = EmbeddingMatrix | NDArray[np.floating] | str | Path


def build_embedding_projection(
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    student_embeddings: Source,
    teacher_embeddings: Source,
    *,
    space: EmbeddingSpace = "shared",
    top_k: int = 4,
    sharpness: float = SHARPNESS,
    min_cosine: float = 0.0,
) -> SparseProjection:
    """Build a projection whose inexact rows hold the teacher tokens with the nearest embeddings.

    Exact rows and control tokens are those of every other builder. A share is proportional to
    ``cosine ** (sharpness * c)``, ``c`` being the largest cosine of the row: the nearer the nearest
    token is, the more of the share it gets. Memory beyond the matrices is bounded by the blocks
    above.

    Args:
        student: Tokenizer of the rows.
        teacher: Tokenizer of the columns.
        student_embeddings: [Vs or more, Ds], an array or a safetensors file with one matrix.
        teacher_embeddings: [Vt or more, Dt]
        space: ``shared`` where one encoder made both; ``anchored`` where each is its model's own,
            which relates them by the tokens that both have.
        top_k: Most teacher tokens in a row.
        sharpness: Exponent of the shares; 0 weighs all of them alike.
        min_cosine: Tokens that are not nearer stand for nothing.

    Raises:
        ProjectionError: Embeddings of the wrong height or width or with numbers that are not
            finite, too few common tokens for an anchored space, an invalid number.
    """
    check_top_k(top_k)
    _check_numbers(sharpness, min_cosine)
    students, teachers = _matrix(student_embeddings), _matrix(teacher_embeddings)
    students.check_height(student.vocab_size, "student")
    teachers.check_height(teacher.vocab_size, "teacher")
    exact = SparseProjection.from_tokenizers(student, teacher, "exact")
    comparable = _space(space, exact, student, students, teachers)
    empty = exact.empty_rows
    lacking = empty[[bool(student.token_bytes(token_id)) for token_id in empty.tolist()]]
    candidates = np.flatnonzero(emitted_tokens(Speller(teacher))).astype(np.int64)

    parts = [
        Entries(exact.entry_rows, exact.indices.astype(np.int64), exact.values.astype(np.float64))
    ]
    for start in range(0, len(lacking), ROWS_AT_ONCE):
        ids = lacking[start : start + ROWS_AT_ONCE]
        vectors = comparable.of_student(students.take(ids))
        nearest_ids, cosines = _nearest(vectors, comparable, teachers, candidates, top_k)
        near = cosines > min_cosine
        rows = np.repeat(ids, near.sum(axis=1))
        parts.append(Entries(rows, nearest_ids[near], sharpened(cosines, sharpness)[near]))
    projection = SparseProjection.from_entries(
        *concatenated(parts),
        exact.shape,
        is_exact_row=exact.is_exact_row,
    )
    options = {
        "space": space,
        "top_k": top_k,
        "sharpness": sharpness,
        "min_cosine": min_cosine,
    }
    return replace(
        projection,
        metadata={
            "method": "embedding",
            "options": json.dumps(options),
            **identity(student, teacher),
        },
    )


def sharpened(cosines: NDArray[np.float32], sharpness: float) -> NDArray[np.float64]:
    """Weight of each cosine [N, K], relative to the largest of its row."""
    positive = np.maximum(cosines.astype(np.float64), 0.0)
    largest = positive.max(axis=1, keepdims=True, initial=0.0)
    relative = positive / np.where(largest > 0, largest, 1.0)
    weights: NDArray[np.float64] = relative ** (sharpness * largest)
    return weights


def _nearest(
    vectors: NDArray[np.float32],
    space: SharedSpace | AnchoredSpace,
    teachers: EmbeddingMatrix,
    candidates: NDArray[np.int64],
    top_k: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Teacher ids [N, K] of the largest cosines, and these; fewer with fewer candidates.

    Of equal cosines the lowest ids come first.
    """
    ids: NDArray[np.int64] = np.zeros((len(vectors), 0), dtype=np.int64)
    cosines: NDArray[np.float32] = np.zeros((len(vectors), 0), dtype=np.float32)
    for start in range(0, len(candidates), COLUMNS_AT_ONCE):
        block = candidates[start : start + COLUMNS_AT_ONCE]
        scores = vectors @ space.of_teacher(teachers.take(block)).T
        best = _largest(scores, top_k)
        ids = np.concatenate([ids, block[best]], axis=1)
        cosines = np.concatenate([cosines, np.take_along_axis(scores, best, axis=1)], axis=1)
        largest = _largest(cosines, top_k)
        ids = np.take_along_axis(ids, largest, axis=1)
        cosines = np.take_along_axis(cosines, largest, axis=1)
    return ids, cosines


def _largest(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Places [N, min(k, M)] of the ``k`` largest of each row, ascending."""
    if scores.shape[1] <= k:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.sort(np.argpartition(-scores, k - 1, axis=1)[:, :k], axis=1)


def _matrix(source: Source) -> EmbeddingMatrix:
    return source if isinstance(source, EmbeddingMatrix) else EmbeddingMatrix(source)


def _space(
    space: EmbeddingSpace,
    exact: SparseProjection,
    student: ByteTokenizer,
    students: EmbeddingMatrix,
    teachers: EmbeddingMatrix,
) -> SharedSpace | AnchoredSpace:
    if space == "shared":
        return SharedSpace(students, teachers)
    if space != "anchored":
        raise ProjectionError(
            "unknown space of embeddings", got=repr(space), expected="shared or anchored"
        )
    common = exact.partition()
    # Embeddings of control tokens depend on their function in one model, not on a meaning.
    ordinary = np.array(
        [student.token_bytes(token_id) is not None for token_id in common.common_student.tolist()],
        dtype=np.bool_,
    )
    return AnchoredSpace(
        students, teachers, common.common_student[ordinary], common.common_teacher[ordinary]
    )


def _check_numbers(sharpness: float, min_cosine: float) -> None:
    if not (np.isfinite(sharpness) and sharpness >= 0):
        raise ProjectionError(
            "the sharpness of shares cannot be used",
            got=sharpness,
            expected="a finite number, at least 0",
            where="sharpness",
        )
    if not 0 <= min_cosine < 1:
        raise ProjectionError(
            "the least cosine cannot be used",
            got=min_cosine,
            expected="at least 0 and below 1",
            where="min_cosine",
        )

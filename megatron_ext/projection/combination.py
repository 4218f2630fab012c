"""Projections made from others: composed through a pivot, filled up, or without padding.

Vs, Vp, Vt vocabularies of student, pivot and teacher.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.compressed_rows import (
    Entries,
    check_top_k,
    compress,
    largest_of_each_row,
    row_pointers,
    with_step,
)
from megatron_ext.projection.projection_matrix import ProjectionMatrix

Matrix = TypeVar("Matrix", bound=ProjectionMatrix)

PRODUCTS_AT_ONCE = 2**22
"""Number of products of shares in memory at once, about 100 MiB."""


def compose(first: Matrix, second: ProjectionMatrix, *, top_k: int | None = None) -> Matrix:
    """``first @ second``: student to pivot to teacher, each row normalised to a sum of 1.

    Shares of pivot tokens with an empty row are dropped before the normalisation. A row is exact
    where the student's row and that of its pivot token are.

    Args:
        first: [Vs, Vp]
        second: [Vp, Vt]
        top_k: Most teacher tokens in a row; None keeps all.

    Raises:
        ProjectionError: The pivots differ in size or fingerprint, or ``top_k`` is below 1.
    """
    if top_k is not None:
        check_top_k(top_k)
    _check_same_vocabulary(first, "teacher", second, "student")
    entry_sizes = np.diff(second.indptr)[first.indices]
    products_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(entry_sizes)])
    blocks = [
        _product(first, second, start, stop, top_k)
        for start, stop in _row_ranges(products_before[first.indptr])
    ]
    rows, columns, values = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    is_exact_row = first.is_exact_row.copy()
    pivots = first.indices[first.indptr[:-1][is_exact_row]]
    is_exact_row[is_exact_row] = second.is_exact_row[pivots]
    return replace(
        first,
        indptr=row_pointers(rows, first.shape[0]),
        indices=columns,
        values=values,
        shape=(first.shape[0], second.shape[1]),
        metadata=_composed_metadata(first, second, top_k),
        is_exact_row=is_exact_row,
        vocab_sizes=(first.vocab_sizes[0], second.vocab_sizes[1]),
    )


def fill_empty_rows(projection: Matrix, other: ProjectionMatrix) -> Matrix:
    """``projection`` with its empty rows taken from ``other``, a projection of the same pair.

    Raises:
        ProjectionError: The two are of different vocabularies.
    """
    for role in ("student", "teacher"):
        _check_same_vocabulary(projection, role, other, role)
    other = other.padded(*projection.shape)
    is_empty = ~projection.reachable_rows
    added = is_empty[other.entry_rows]
    filled = projection.from_entries(
        np.concatenate([projection.entry_rows, other.entry_rows[added]]),
        np.concatenate([projection.indices, other.indices[added]]),
        np.concatenate([projection.values, other.values[added]]),
        projection.shape,
        vocab_sizes=projection.vocab_sizes,
        is_exact_row=projection.is_exact_row | (is_empty & other.is_exact_row),
        normalise=False,
    )
    method = other.metadata.get("method", "unknown")
    rows = int(np.count_nonzero(is_empty & other.reachable_rows))
    return replace(
        filled,
        metadata=with_step(projection.metadata, "fill_empty_rows", method=method, rows=rows),
    )


def drop_padding(projection: Matrix, vocab_sizes: tuple[int, int]) -> Matrix:
    """``projection`` without entries of ids from ``vocab_sizes`` on, rows normalised anew.

    For a projection built with the sizes of the models' heads instead of the tokenizers'.

    Args:
        projection: [Vs, Vt]; the shape stays.
        vocab_sizes: Tokens of the student and the teacher.

    Raises:
        ProjectionError: A size below 0 or above that of the projection.
    """
    for size, role, held in zip(
        vocab_sizes, ("student", "teacher"), projection.vocab_sizes, strict=True
    ):
        if not 0 <= size <= held:
            raise ProjectionError(
                f"the projection is of a smaller {role} vocabulary", got=size, expected=held
            )
    is_token = projection.entry_rows < vocab_sizes[0]
    is_token &= projection.indices < vocab_sizes[1]
    unpadded = projection.from_entries(
        projection.entry_rows[is_token],
        projection.indices[is_token],
        projection.values[is_token],
        projection.shape,
        vocab_sizes=vocab_sizes,
        is_exact_row=np.zeros(projection.shape[0], dtype=np.bool_),
    )
    return replace(
        unpadded,
        is_exact_row=projection.is_exact_row & unpadded.reachable_rows,
        metadata=with_step(projection.metadata, "drop_padding", vocab_sizes=list(vocab_sizes)),
    )


def _row_ranges(products_before: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges of rows of at most ``PRODUCTS_AT_ONCE`` products each, or of one row."""
    row_count = len(products_before) - 1
    ranges, start = [], 0
    while start < row_count:
        limit = products_before[start] + PRODUCTS_AT_ONCE
        stop = int(np.searchsorted(products_before, limit, side="right")) - 1
        ranges.append((start, max(stop, start + 1)))
        start = ranges[-1][1]
    return ranges or [(0, 0)]


def _product(
    first: ProjectionMatrix, second: ProjectionMatrix, start: int, stop: int, top_k: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Rows, columns and shares of the entries of rows ``[start, stop)`` of the product."""
    block = first.row_block(start, stop)
    sizes = np.diff(second.indptr)[block.indices]
    place = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    entry = np.repeat(second.indptr[:-1][block.indices], sizes) + place
    products = Entries(
        np.repeat(block.entry_rows, sizes),
        second.indices[entry].astype(np.int64),
        np.repeat(block.values.astype(np.float64), sizes) * second.values[entry],
    )
    shape = (stop - start, second.shape[1])
    indptr, indices, values = compress(products, shape)
    if top_k is not None:
        indptr, indices, values = largest_of_each_row(indptr, indices, values, shape, top_k)
    return np.repeat(np.arange(start, stop), np.diff(indptr)), indices, values


def _composed_metadata(
    first: ProjectionMatrix, second: ProjectionMatrix, top_k: int | None
) -> dict[str, str]:
    methods = [projection.metadata.get("method", "unknown") for projection in (first, second)]
    pivot = first.metadata.get("teacher_fingerprint")
    sides = (("student", first.metadata), ("teacher", second.metadata))
    return {
        "method": "composition",
        "options": json.dumps({"of": methods, "pivot_fingerprint": pivot, "top_k": top_k}),
        **{
            key: metadata[key]
            for role, metadata in sides
            for key in (f"{role}_fingerprint", f"{role}_vocab_size")
            if key in metadata
        },
    }


def _check_same_vocabulary(
    first: ProjectionMatrix,
    first_role: str,
    second: ProjectionMatrix,
    second_role: str,
) -> None:
    """Refuse two projections whose common vocabulary differs."""
    axis = {"student": 0, "teacher": 1}
    sizes = first.vocab_sizes[axis[first_role]], second.vocab_sizes[axis[second_role]]
    prints = (
        first.metadata.get(f"{first_role}_fingerprint"),
        second.metadata.get(f"{second_role}_fingerprint"),
    )
    if sizes[0] == sizes[1] and (None in prints or prints[0] == prints[1]):
        return
    shown = [
        f"{size} tokens, fingerprint {(text or 'unknown')[:12]}"
        for size, text in zip(sizes, prints, strict=True)
    ]
    raise ProjectionError(
        f"the {second_role} of the second projection is not the {first_role} of the first",
        got=shown[1],
        expected=shown[0],
        fix="build both with the same tokenizer",
    )

"""Sparse matrices in compressed rows, weighted entries to make them of, and checks of projections.

R rows and N columns of a matrix, nnz entries, with no condition on row sums; N weighted entries
that are not compressed yet, in a matrix Vs x Vt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.errors import ProjectionError, refused_by_system
from megatron_ext.files import write_bytes

if TYPE_CHECKING:
    from megatron_ext.tokenizers.base import ByteTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class CompressedRows:
    """[R, N] matrix in the form that kernels take.

    The transpose of a projection is one: its arrays are the compressed columns of the projection.
    """

    indptr: NDArray[np.int64]
    """[R + 1] start of each row's entries."""

    indices: NDArray[np.int32]
    """[nnz] columns, ascending within a row."""

    values: NDArray[np.float32]
    """[nnz]"""

    shape: tuple[int, int]
    """(R, N)"""

    @property
    def entry_count(self) -> int:
        """nnz, number of entries."""
        return len(self.indices)

    @property
    def entry_rows(self) -> NDArray[np.int64]:
        """Row of each entry, [nnz]."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))

    def transpose(self) -> CompressedRows:
        """Transpose [N, R]; columns ascend in each of its rows."""
        # A stable sort by column keeps the entries of a column in the order of their rows.
        order = np.argsort(self.indices, kind="stable")
        return CompressedRows(
            indptr=row_pointers(self.indices, self.shape[1]),
            indices=self.entry_rows[order].astype(np.int32),
            values=self.values[order],
            shape=self.shape[::-1],
        )

    def column_block(self, start: int, stop: int) -> CompressedRows:
        """Columns ``[start, stop)``, counted from ``start``; columns from N on are empty.

        Raises:
            ProjectionError: ``start`` below 0 or ``stop`` below ``start``.
        """
        check_block("column", start, stop)
        inside = (self.indices >= start) & (self.indices < stop)
        return CompressedRows(
            indptr=row_pointers(self.entry_rows[inside], self.shape[0]),
            indices=self.indices[inside] - np.int32(start),
            values=self.values[inside],
            shape=(self.shape[0], stop - start),
        )


def row_pointers(entry_rows: NDArray[np.integer], row_count: int) -> NDArray[np.int64]:
    """Start of each row's entries, [R + 1], from the row of each entry [nnz]."""
    indptr = np.zeros(row_count + 1, dtype=np.int64)
    np.cumsum(np.bincount(entry_rows, minlength=row_count), out=indptr[1:])
    return indptr


def check_block(noun: str, start: int, stop: int) -> None:
    """Refuse an invalid range of rows or columns.

    Raises:
        ProjectionError: ``start`` below 0 or ``stop`` below ``start``.
    """
    if not 0 <= start <= stop:
        raise ProjectionError(
            f"a {noun} block runs backwards", got=(start, stop), expected="0 <= start <= stop"
        )


class Entries(NamedTuple):
    """Weighted pairs of tokens, in any order; a pair may be repeated."""

    rows: NDArray[np.int64]
    """[N] student ids."""

    columns: NDArray[np.int64]
    """[N] teacher ids."""

    weights: NDArray[np.float64]
    """[N] none below 0."""


def concatenated(parts: Sequence[Entries]) -> Entries:
    """Concatenate the entries of all parts."""
    return Entries(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def checked_entries(
    rows: ArrayLike, columns: ArrayLike, weights: ArrayLike, shape: tuple[int, int]
) -> Entries:
    """Convert arrays to entries, checked to lie inside ``shape``.

    Raises:
        ProjectionError: They differ in length, ids are no integers or outside ``shape``, or a
            weight is not finite or below 0. The text names the first such entry.
    """
    row_ids, column_ids = np.asarray(rows), np.asarray(columns)
    try:
        numbers = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        # RuntimeError: a tensor of torch with a graph.
        raise ProjectionError(
            "the weights of a projection are not numbers that numpy reads",
            got=getattr(weights, "dtype", type(weights).__name__),
            expected="numbers, or a tensor of torch as detach().float().cpu() gives it",
        ) from None
    if not (row_ids.ndim == 1 and row_ids.shape == column_ids.shape == numbers.shape):
        raise ProjectionError(
            "rows, columns and weights of a projection differ in length",
            got=f"{row_ids.shape}, {column_ids.shape} and {numbers.shape}",
            expected="three arrays of one length",
        )
    for noun, ids, size in (("row", row_ids, shape[0]), ("column", column_ids, shape[1])):
        if len(ids) and not np.issubdtype(ids.dtype, np.integer):
            raise ProjectionError(
                f"the {noun}s of a projection are not ids", got=ids.dtype, expected="integers"
            )
        outside = (ids < 0) | (ids >= size)
        _refuse_first(outside, f"has a {noun} outside the vocabulary", ids, f"0 to {size - 1}")
    unusable = ~(np.isfinite(numbers) & (numbers >= 0))
    _refuse_first(unusable, "has an unusable weight", numbers, "a finite number, at least 0")
    return Entries(row_ids.astype(np.int64), column_ids.astype(np.int64), numbers)


def compress(
    entries: Entries, shape: tuple[int, int], *, normalise: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Compress weighted entries into rows; weights of a repeated pair are added up.

    A share that is 0 in float32, as of a fortieth piece, has no entry.

    Args:
        entries: [N]
        shape: (Vs, Vt)
        normalise: Divide each row by its sum; else weights stay as they are.

    Returns:
        indptr [Vs + 1], indices [nnz] ascending within a row, values [nnz].
    """
    weights = entries.weights
    if normalise:
        # Weights near 1e308 overflow a sum; relative to the row's largest they do not.
        largest = np.zeros(shape[0])
        np.maximum.at(largest, entries.rows, weights)
        weights = weights / np.where(largest > 0, largest, 1.0)[entries.rows]
    pairs, place = np.unique(entries.rows * shape[1] + entries.columns, return_inverse=True)
    totals = np.bincount(place, weights=weights, minlength=len(pairs))
    rows, columns = np.divmod(pairs, max(shape[1], 1))
    if normalise:
        row_totals = np.bincount(rows, weights=totals, minlength=shape[0])
        totals = totals / np.where(row_totals > 0, row_totals, 1.0)[rows]
    values = totals.astype(np.float32)
    positive = values > 0
    return (
        row_pointers(rows[positive], shape[0]),
        columns[positive].astype(np.int32),
        values[positive],
    )


def largest_of_each_row(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    values: NDArray[np.float32],
    shape: tuple[int, int],
    k: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Compress the ``k`` largest values of each row, normalised to a sum of 1.

    Of equal values the first ones are kept.

    Raises:
        ProjectionError: ``k`` below 1.
    """
    check_top_k(k)
    rows = np.repeat(np.arange(shape[0]), np.diff(indptr))
    order = np.lexsort((-values, rows))
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.arange(len(values)) - indptr[:-1][rows]
    is_largest = rank < k
    return compress(
        Entries(
            rows[is_largest],
            indices[is_largest].astype(np.int64),
            values[is_largest].astype(np.float64),
        ),
        shape,
    )


def check_top_k(top_k: int) -> None:
    """Refuse a limit that leaves no entry in a row.

    Raises:
        ProjectionError: ``top_k`` is no integer or below 1.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1:
        raise ProjectionError(
            "top_k leaves no entry in a row", got=top_k, expected="at least 1", where="top_k"
        )


def _refuse_first(bad: NDArray[np.bool_], what: str, values: NDArray[Any], expected: str) -> None:
    if bad.any():
        at = int(np.argmax(bad))
        raise ProjectionError(
            f"entry {at} of a projection {what}", got=values[at], expected=expected
        )


HISTORY = "history"
"""Metadata key: JSON list of the steps applied to a projection since it was built, oldest first."""


def with_step(metadata: Mapping[str, str], step: str, **options: object) -> dict[str, str]:
    """``metadata`` with one more step in its history."""
    steps = [*json.loads(metadata.get(HISTORY, "[]")), {"step": step, **options}]
    return {**metadata, HISTORY: json.dumps(steps)}


ROW_SUM_TOLERANCE = 1e-6
"""Rounding to float32 moves a share by at most 2**-24 of itself, and so the sum of a row by at most
2**-24, for any number of entries; shares are added up in float64."""


def check_projection(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    values: NDArray[np.float32],
    is_exact_row: NDArray[np.bool_],
    shape: tuple[int, int],
    vocab_sizes: tuple[int, int],
) -> None:
    """Check the arrays of a ``SparseProjection``; about 10 ms for 131,072 rows.

    Raises:
        ProjectionError: The first defect, with the first row that has it.
    """
    _check_sizes(shape, vocab_sizes)
    _check_arrays(indptr, indices, values, is_exact_row, shape)
    _check_row_pointers(indptr, len(indices))
    row_sizes = np.diff(indptr)
    rows = np.repeat(np.arange(shape[0]), row_sizes)

    outside = (indices < 0) | (indices >= vocab_sizes[1])
    if (at := _first(outside)) is not None:
        expected = f"0 to {vocab_sizes[1] - 1}"
        _refuse(rows[at], "has a column outside the teacher's vocabulary", indices[at], expected)
    if (at := _first(row_sizes[vocab_sizes[0] :] > 0)) is not None:
        row = at + vocab_sizes[0]
        _refuse(row, "is padding and not empty", f"{row_sizes[row]} entries", "none")

    unsorted = (indices[1:] <= indices[:-1]) & (rows[1:] == rows[:-1])
    if (at := _first(unsorted)) is not None:
        got = f"{indices[at]} before {indices[at + 1]}"
        _refuse(rows[at], "has columns that do not ascend", got, "each column once, ascending")

    unusable = ~(np.isfinite(values) & (values > 0))
    if (at := _first(unusable)) is not None:
        _refuse(rows[at], "has an unusable share", values[at], "a finite number above 0")

    sums = np.bincount(rows, weights=values, minlength=shape[0])
    wrong = (row_sizes > 0) & (np.abs(sums - 1.0) > ROW_SUM_TOLERANCE)
    if (at := _first(wrong)) is not None:
        expected = f"1 within {ROW_SUM_TOLERANCE:g}, or an empty row"
        _refuse(at, "does not sum to 1", sums[at], expected)

    overclaimed = is_exact_row & (row_sizes != 1)
    if (at := _first(overclaimed)) is not None:
        _refuse(at, "is marked exact", f"{row_sizes[at]} entries", "1 entry")


def check_built_for(
    path: Path | None, metadata: Mapping[str, str], role: str, tokenizer: ByteTokenizer
) -> None:
    """Refuse a projection whose metadata does not name the vocabulary of ``tokenizer``.

    Args:
        path: Its file, for the error; None for one in memory.

    Raises:
        ProjectionError: It names another vocabulary, or none.
    """
    built_for, given = metadata.get(f"{role}_fingerprint"), tokenizer.fingerprint()
    if built_for != given:
        raise ProjectionError(
            f"this projection was built for another {role}",
            where=path,
            got=_vocabulary(metadata.get(f"{role}_vocab_size"), built_for),
            expected=f"{_vocabulary(tokenizer.vocab_size, given)}, the {role} given",
            fix="build it for this pair: megatron-ext projection build, or "
            "SparseProjection.from_tokenizers(student, teacher)",
        )


def write_projection(path: Path, content: bytes, *, what: str = "the projection") -> None:
    """Write the file of a projection, or of what comes with one, whole.

    Raises:
        ProjectionError: The file cannot be written.
    """
    with refused_by_system(
        f"{what} cannot be written",
        where=path,
        expected="a file name in an existing folder with room and write permission",
        fix="create the folder first",
        kind=ProjectionError,
    ):
        # A missing folder is more often a typing error than a folder to make.
        path.parent.stat()
        write_bytes(path, content)


def _vocabulary(size: object, fingerprint: str | None) -> str:
    if fingerprint is None:
        return "a vocabulary without a fingerprint"
    return f"a vocabulary of {size} ids with fingerprint {fingerprint[:12]}"


def _check_sizes(shape: tuple[int, int], vocab_sizes: tuple[int, int]) -> None:
    for side, size, real in zip(("student", "teacher"), shape, vocab_sizes, strict=True):
        if not 0 <= real <= size:
            raise ProjectionError(
                f"a projection {shape} does not hold the {side}'s vocabulary",
                got=f"{size} ids for {real} tokens",
                expected="as many ids as tokens, or more",
            )


def _check_arrays(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    values: NDArray[np.float32],
    is_exact_row: NDArray[np.bool_],
    shape: tuple[int, int],
) -> None:
    expected: dict[str, tuple[Any, type[np.generic], int | None]] = {
        "indptr": (indptr, np.int64, shape[0] + 1),
        "indices": (indices, np.int32, None),
        "values": (values, np.float32, np.size(indices)),
        "is_exact_row": (is_exact_row, np.bool_, shape[0]),
    }
    for name, (array, dtype, length) in expected.items():
        is_row = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype
        if not is_row or (length is not None and len(array) != length):
            raise ProjectionError(
                f"the array {name} of a projection {shape} has another form",
                got=f"shape {np.shape(array)} of {getattr(array, 'dtype', type(array).__name__)}",
                expected=f"shape ({'nnz' if length is None else length},) of {dtype.__name__}",
            )


def _check_row_pointers(indptr: NDArray[np.int64], entry_count: int) -> None:
    if indptr[0] != 0:
        _refuse(0, "does not start at the first entry", indptr[0], 0)
    if (at := _first(indptr[1:] < indptr[:-1])) is not None:
        _refuse(at, "ends before it starts", indptr[at + 1], f"at least {indptr[at]}")
    if indptr[-1] != entry_count:
        _refuse(len(indptr) - 2, "does not end at the last entry", indptr[-1], entry_count)


def _first(bad: NDArray[np.bool_]) -> int | None:
    return int(np.argmax(bad)) if bad.any() else None


def _refuse(row: Any, what: str, got: object, expected: object) -> NoReturn:
    raise ProjectionError(
        f"row {int(row)} of the projection {what}",
        got=got,
        expected=expected,
        fix="build the projection again from the two tokenizers",
    )

"""A sparse matrix in compressed rows, with nothing promised about its sums. R rows, N columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError


@dataclass(frozen=True, slots=True, eq=False)
class CompressedRows:
    """A [R, N] matrix, as kernels take it.

    The transpose of a projection is one: its arrays are the compressed columns of the projection.
    """

    indptr: NDArray[np.int64]
    """[R + 1] where the entries of each row start."""

    indices: NDArray[np.int32]
    """[nnz] columns, ascending within a row."""

    values: NDArray[np.float32]
    """[nnz]"""

    shape: tuple[int, int]
    """(R, N)"""

    @property
    def entry_count(self) -> int:
        """nnz."""
        return len(self.indices)

    @property
    def entry_rows(self) -> NDArray[np.int64]:
        """[nnz] the row of each entry."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))

    def transpose(self) -> CompressedRows:
        """The [N, R] matrix of the same entries; rows ascend in each of its columns."""
        # A stable sort by column leaves the entries of a column in the order of their rows.
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
    """[R + 1] where the entries of each row start, from the row of each entry [nnz]."""
    indptr = np.zeros(row_count + 1, dtype=np.int64)
    np.cumsum(np.bincount(entry_rows, minlength=row_count), out=indptr[1:])
    return indptr


def check_block(noun: str, start: int, stop: int) -> None:
    """Refuse a range of rows or columns that is none.

    Raises:
        ProjectionError: ``start`` below 0 or ``stop`` below ``start``.
    """
    if not 0 <= start <= stop:
        raise ProjectionError(
            f"a {noun} block runs backwards", got=(start, stop), expected="0 <= start <= stop"
        )

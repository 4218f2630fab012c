"""Unchecked entries of a projection, as a file holds them. Vs rows, K slots a row, n entries.

A file may repeat a column or miss a sum, so its content may not be a projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.compressed_rows import ROW_SUM_TOLERANCE
from megatron_ext.projection.projection_matrix import ProjectionMatrix

Mask = NDArray[np.bool_]

FLOAT32_ROUNDING = 2.0**-24
MOST_IDS = 2**24
"""Most rows or columns accepted of a file: far more than any vocabulary, and still small in
memory."""


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class LooseEntries:
    """Weighted (row, column) pairs, ordered by row and slot.

    Raises:
        ProjectionError: A row or column that is not an id, more rows or columns than ``MOST_IDS``,
            or a weight that is negative or no number.
    """

    rows: NDArray[np.int64]
    """[n] student ids, ascending."""

    columns: NDArray[np.int64]
    """[n] teacher ids."""

    weights: NDArray[np.float64]
    """[n] as stored, above 0."""

    slots: NDArray[np.int64]
    """[n] place of the entry in its row."""

    height: int
    """Vs of the file."""

    width: int | None = None
    """Vt of the file; None where it does not say."""

    vocab_sizes: tuple[int, int] | None = None
    """Tokens of the vocabularies, padding aside; None where the file does not say."""

    slot_count: int = 0
    """K of a table; 0 where the file is a list of pairs."""

    rounding: float = FLOAT32_ROUNDING
    """Largest relative error of a stored weight; 2**-8 for bfloat16."""

    strict_rows: Mask | None = None
    """[Vs] rows that the original loss's strict rule counts as common: 1 in slot 0, -1 in slot 1;
    None where the file is no table."""

    is_exact_row: Mask | None = None
    """[Vs] tokens that the teacher has exactly; None where the file does not say."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the file."""

    def __post_init__(self) -> None:
        for name, ids, stop in (
            ("row", self.rows, self.height),
            ("column", self.columns, MOST_IDS if self.width is None else self.width),
        ):
            if stop > MOST_IDS:
                raise ProjectionError(
                    f"the projection has more {name}s than a vocabulary has ids",
                    got=stop,
                    expected=f"at most {MOST_IDS}",
                )
            outside = (ids < 0) | (ids >= stop)
            if outside.any():
                at = int(np.argmax(outside))
                raise ProjectionError(
                    f"row {self.rows[at]} of the projection has a {name} that is not an id",
                    got=int(ids[at]),
                    expected=f"0 to {stop - 1}" if stop > 0 else "0 or more",
                )
        unusable = ~(np.isfinite(self.weights) & (self.weights > 0))
        if unusable.any():
            at = int(np.argmax(unusable))
            raise ProjectionError(
                f"row {self.rows[at]} of the projection has an unusable weight",
                got=float(self.weights[at]),
                expected="a finite number of at least 0",
            )

    @property
    def entry_count(self) -> int:
        """n, number of entries."""
        return len(self.rows)

    @property
    def row_sums(self) -> NDArray[np.float64]:
        """Sum of each row's weights, [Vs]."""
        return np.bincount(self.rows, self.weights, self.height).astype(np.float64)

    @property
    def row_sizes(self) -> NDArray[np.int64]:
        """Number of entries of each row, [Vs]."""
        return np.bincount(self.rows, minlength=self.height)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of each entry in its row, [n]."""
        return self.weights / self.row_sums[self.rows]

    @property
    def keys(self) -> NDArray[np.int64]:
        """Unique number of each pair of row and column, [n]."""
        stop = int(self.columns.max(initial=0)) + 1 if self.width is None else self.width
        return self.rows * stop + self.columns

    @property
    def least_width(self) -> int:
        """Vt: the file's, else one past the largest column."""
        return self.width or int(self.columns.max(initial=0)) + 1

    def kept(self, mask: Mask) -> LooseEntries:
        """Entries where ``mask`` [n] is set."""
        return replace(
            self,
            rows=self.rows[mask],
            columns=self.columns[mask],
            weights=self.weights[mask],
            slots=self.slots[mask],
        )

    def merged(self) -> LooseEntries:
        """Add up repeated columns of a row; the largest share of a row comes first."""
        keys, first, place = np.unique(self.keys, return_index=True, return_inverse=True)
        return sorted_entries(
            self.rows[first],
            self.columns[first],
            np.bincount(place, self.weights, len(keys)).astype(np.float64),
            like=self,
        )

    @classmethod
    def of(cls, projection: ProjectionMatrix) -> LooseEntries:
        """Entries of a projection, in the order of their columns."""
        rows = projection.entry_rows
        return cls(
            rows=rows,
            columns=projection.indices.astype(np.int64),
            weights=projection.values.astype(np.float64),
            slots=np.arange(projection.entry_count) - projection.indptr[rows],
            height=projection.shape[0],
            width=projection.shape[1],
            vocab_sizes=projection.vocab_sizes,
            is_exact_row=projection.is_exact_row,
            metadata=projection.metadata,
        )

    def projection(
        self,
        shape: tuple[int, int],
        *,
        vocab_sizes: tuple[int, int] | None = None,
        is_exact_row: Mask | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> ProjectionMatrix:
        """Convert to a projection: add up repeated columns and normalise each row to a sum of 1.

        Rows that already sum to 1 keep every bit.

        Args:
            shape: (Vs, Vt), which holds every entry.
            vocab_sizes: Tokens of the vocabularies; ``shape`` where not given.
            is_exact_row: [Vs], by default rows of one entry.
            metadata: By default that of these entries.

        Raises:
            ProjectionError: An entry outside ``shape``, or in the padding.
        """
        sums = self.row_sums
        divisors = np.where(np.abs(sums - 1) <= ROW_SUM_TOLERANCE, 1, sums)
        return ProjectionMatrix.from_entries(
            self.rows,
            self.columns,
            self.weights / divisors[self.rows],
            shape,
            self.metadata if metadata is None else metadata,
            vocab_sizes=vocab_sizes,
            is_exact_row=is_exact_row,
            normalise=False,
        )


def sorted_entries(
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    weights: NDArray[np.float64],
    *,
    like: LooseEntries,
) -> LooseEntries:
    """Sort entries by row, the largest first, of equals the lowest column; else as ``like``."""
    order = np.lexsort((columns, -weights, rows))
    ordered = rows[order]
    starts = np.searchsorted(ordered, ordered)
    return replace(
        like,
        rows=ordered,
        columns=columns[order],
        weights=weights[order],
        slots=np.arange(len(ordered)) - starts,
    )

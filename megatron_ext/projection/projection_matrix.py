"""Sparse matrix that maps one vocabulary to another. Vocabularies Vs and Vt.

Row ``s`` holds the teacher tokens that student token ``s`` maps to, and their shares. A row sums to
1, or is empty where the token maps to none. No dense Vs x Vt exists at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.compressed_rows import (
    CompressedRows,
    check_block,
    check_projection,
    checked_entries,
    compress,
    largest_of_each_row,
    row_pointers,
    with_step,
)
from megatron_ext.projection.vocabulary_partition import VocabularyPartition

if TYPE_CHECKING:
    from typing_extensions import Self

    from megatron_ext.projection.layout import VocabularyLayout


_ROWS_OF_ONE_ENTRY: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
"""Default of ``is_exact_row``: derived from the rows."""

_AS_SHAPE = (-1, -1)
"""Default of ``vocab_sizes``: no padding."""

ARRAYS = ("indptr", "indices", "values", "is_exact_row")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProjectionMatrix(CompressedRows):
    """[Vs, Vt] matrix in compressed rows, padding included; its arrays are read-only.

    ``indices`` are teacher ids and ``values`` shares: positive, and 1 over a row that is not empty.
    The transpose and the column blocks are plain matrices, whose rows have other sums. Two
    projections are equal where arrays, sizes and metadata are, bit for bit.

    Raises:
        ProjectionError: Arrays that are not such a matrix; the text names the first bad row.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    """The projection's origin, and the pair that it is for."""

    is_exact_row: NDArray[np.bool_] = field(default_factory=lambda: _ROWS_OF_ONE_ENTRY)
    """[Vs] this token and its column are one token. Rows of one entry, unless said otherwise: a row
    of one entry that is not exact is a token the teacher spells with one piece several times
    (``====`` as ``==``, ``==``), or one that its own tokenizer never emits (``<0x41>`` for the
    teacher's ``A``, where the student has ``A`` too)."""

    vocab_sizes: tuple[int, int] = _AS_SHAPE
    """Tokens of the two vocabularies; rows and columns behind them are padding and empty. As
    ``shape``, unless said otherwise."""

    def __post_init__(self) -> None:
        if self.is_exact_row is _ROWS_OF_ONE_ENTRY:
            object.__setattr__(self, "is_exact_row", np.diff(np.asarray(self.indptr)) == 1)
        if self.vocab_sizes == _AS_SHAPE:
            object.__setattr__(self, "vocab_sizes", self.shape)
        check_projection(
            self.indptr, self.indices, self.values, self.is_exact_row, self.shape, self.vocab_sizes
        )
        for name in ARRAYS:
            frozen = getattr(self, name).view()
            frozen.setflags(write=False)
            object.__setattr__(self, name, frozen)
        if not all(isinstance(text, str) for entry in self.metadata.items() for text in entry):
            raise ProjectionError(
                "the metadata of a projection is not text",
                got=self.metadata,
                expected="dict[str, str]",
            )
        object.__setattr__(self, "metadata", dict(self.metadata))

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"{type(self).__name__}({rows:,} x {columns:,}, {self.entry_count:,} entries)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProjectionMatrix):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.vocab_sizes == other.vocab_sizes
            and self.metadata == other.metadata
            and all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAYS)
        )

    @classmethod
    def from_entries(
        cls,
        rows: ArrayLike,
        columns: ArrayLike,
        weights: ArrayLike,
        shape: tuple[int, int],
        metadata: Mapping[str, str] | None = None,
        *,
        vocab_sizes: tuple[int, int] | None = None,
        is_exact_row: NDArray[np.bool_] | None = None,
        normalise: bool = True,
    ) -> Self:
        """Build a projection from weighted pairs of tokens, in any order.

        Weights of a repeated pair are added up; a pair of weight 0 is no entry. Memory is linear in
        N and V.

        Args:
            rows: Student ids [N].
            columns: Teacher ids [N].
            weights: [N], finite and none below 0.
            shape: (Vs, Vt), padding included.
            metadata: Origin of the projection, and its pair.
            vocab_sizes: Tokens of the vocabularies; ``shape`` where not given.
            is_exact_row: [Vs]; rows of one entry where not given.
            normalise: Divide each row by its sum. Otherwise rows must sum to 1.

        Raises:
            ProjectionError: Arrays of different lengths, ids outside ``shape``, unusable weights,
                rows that do not sum to 1 though they should.
        """
        entries = checked_entries(rows, columns, weights, shape)
        indptr, indices, values = compress(entries, shape, normalise=normalise)
        return cls(
            indptr=indptr,
            indices=indices,
            values=values,
            shape=shape,
            metadata={} if metadata is None else metadata,
            is_exact_row=_ROWS_OF_ONE_ENTRY if is_exact_row is None else is_exact_row,
            vocab_sizes=_AS_SHAPE if vocab_sizes is None else vocab_sizes,
        )

    @property
    def empty_rows(self) -> NDArray[np.int64]:
        """Student ids that map to no teacher token, ascending, without padding."""
        return np.flatnonzero(np.diff(self.indptr)[: self.vocab_sizes[0]] == 0).astype(np.int64)

    @property
    def reachable_rows(self) -> NDArray[np.bool_]:
        """Mask [Vs] of student tokens that map to a teacher token."""
        return np.diff(self.indptr) > 0

    @property
    def reachable_columns(self) -> NDArray[np.bool_]:
        """Mask [Vt] of teacher tokens that a student token maps to."""
        reachable = np.zeros(self.shape[1], dtype=np.bool_)
        reachable[self.indices] = True
        return reachable

    @property
    def column_mass(self) -> NDArray[np.float64]:
        """Sum of each column [Vt]: the number of student tokens that map to a teacher token."""
        mass = np.bincount(self.indices, weights=self.values, minlength=self.shape[1])
        return mass.astype(np.float64)

    def partition(self, min_share: float | None = None) -> VocabularyPartition:
        """Common and uncommon tokens of the two vocabularies; see ``VocabularyPartition.of``."""
        return VocabularyPartition.of(self, min_share)

    def top_k(self, k: int) -> Self:
        """Keep the ``k`` largest shares of each row, normalised to a sum of 1.

        Of equal shares, those of the lowest columns are kept.

        Raises:
            ProjectionError: ``k`` below 1.
        """
        indptr, indices, values = largest_of_each_row(
            self.indptr, self.indices, self.values, self.shape, k
        )
        return replace(
            self,
            indptr=indptr,
            indices=indices,
            values=values,
            metadata=with_step(self.metadata, "top_k", k=int(k)),
        )

    def padded(self, student_size: int, teacher_size: int) -> Self:
        """Pad the projection with empty rows and columns up to these sizes.

        Args:
            student_size: Rows, at least the student's vocabulary: those of the model's head.
            teacher_size: Columns, at least the teacher's vocabulary.

        The sizes of the vocabularies give the projection without padding.

        Raises:
            ProjectionError: A size below that of the vocabulary.
        """
        real_rows = self.vocab_sizes[0]
        indptr = np.full(max(student_size, real_rows) + 1, self.entry_count, dtype=np.int64)
        indptr[: real_rows + 1] = self.indptr[: real_rows + 1]
        is_exact_row = np.zeros(len(indptr) - 1, dtype=np.bool_)
        is_exact_row[:real_rows] = self.is_exact_row[:real_rows]
        return replace(
            self, indptr=indptr, is_exact_row=is_exact_row, shape=(student_size, teacher_size)
        )

    def row_block(self, start: int, stop: int) -> Self:
        """Rows ``[start, stop)``, for one shard of the student's vocabulary.

        Rows from Vs on, the padding of a sharded vocabulary, are empty.

        Raises:
            ProjectionError: ``start`` below 0 or ``stop`` below ``start``.
        """
        check_block("row", start, stop)
        bounds = np.minimum(np.arange(start, stop + 1), self.shape[0])
        indptr = self.indptr[bounds]
        entries = slice(int(indptr[0]), int(indptr[-1]))
        is_exact_row = np.zeros(stop - start, dtype=np.bool_)
        inside = self.is_exact_row[start:stop]
        is_exact_row[: len(inside)] = inside
        real_rows = min(max(self.vocab_sizes[0] - start, 0), stop - start)
        return replace(
            self,
            indptr=indptr - indptr[0],
            indices=self.indices[entries],
            values=self.values[entries],
            shape=(stop - start, self.shape[1]),
            metadata={**self.metadata, "rows": f"{start}:{stop}"},
            is_exact_row=is_exact_row,
            vocab_sizes=(real_rows, self.vocab_sizes[1]),
        )

    def permuted(self, layout: VocabularyLayout) -> Self:
        """Reorder the projection from ids to places of a layout, without padding.

        Its metadata names no vocabulary, since places are unknown to tokenizers.

        Raises:
            ProjectionError: ``layout`` is of vocabularies of other sizes.
        """
        students, teachers = self.vocab_sizes
        layout.check_sizes(students, teachers)
        rows = layout.student.places[self.entry_rows]
        columns = layout.teacher.places[self.indices]
        order = np.lexsort((columns, rows))
        is_exact_row = np.zeros(students, dtype=np.bool_)
        is_exact_row[layout.student.places[:students]] = self.is_exact_row[:students]
        # A result by places fits no tokenizer's ids, so it must pass no check against a pair.
        metadata = {name: text for name, text in self.metadata.items() if "fingerprint" not in name}
        return replace(
            self,
            indptr=row_pointers(rows, students),
            indices=columns[order].astype(np.int32),
            values=self.values[order],
            shape=(students, teachers),
            metadata=with_step(metadata, "permuted", ranks=layout.rank_count),
            is_exact_row=is_exact_row,
            vocab_sizes=(students, teachers),
        )

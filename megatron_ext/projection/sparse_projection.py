"""The map from one vocabulary to another, as a sparse matrix. V vocabularies Vs and Vt.

Row ``s`` says which teacher tokens stand for student token ``s``, and in what shares. A row sums to
1 or is empty, which says that nothing stands for the token. No dense Vs x Vt exists at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.validation import check_projection

if TYPE_CHECKING:
    from megatron_ext.projection.builders import ProjectionMethod
    from megatron_ext.tokenizers.byte_tokenizer import ByteTokenizer


_ROWS_OF_ONE_ENTRY: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
"""Stands for an ``is_exact_row`` that the caller leaves to be derived."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseProjection:
    """A [Vs, Vt] matrix in compressed sparse rows; its arrays are read-only.

    Raises:
        ProjectionError: Arrays that are not such a matrix; the text names the first bad row.
    """

    indptr: NDArray[np.int64]
    """[Vs + 1] where the entries of each row start."""

    indices: NDArray[np.int32]
    """[nnz] teacher ids, ascending within a row."""

    values: NDArray[np.float32]
    """[nnz] shares, positive; a row sums to 1."""

    shape: tuple[int, int]
    """(Vs, Vt)"""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """How the projection was made and for which pair."""

    is_exact_row: NDArray[np.bool_] = field(default_factory=lambda: _ROWS_OF_ONE_ENTRY)
    """[Vs] the teacher has this very token. Rows of one entry, unless said otherwise: a row of one
    entry that is not exact is a token the teacher spells with one piece several times (``====`` as
    ``==``, ``==``)."""

    def __post_init__(self) -> None:
        if self.is_exact_row is _ROWS_OF_ONE_ENTRY:
            object.__setattr__(self, "is_exact_row", np.diff(np.asarray(self.indptr)) == 1)
        check_projection(self.indptr, self.indices, self.values, self.is_exact_row, self.shape)
        for name in ("indptr", "indices", "values", "is_exact_row"):
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

    @property
    def entry_count(self) -> int:
        """nnz."""
        return len(self.indices)

    @property
    def empty_rows(self) -> NDArray[np.int64]:
        """Student ids that nothing stands for, ascending."""
        return np.flatnonzero(np.diff(self.indptr) == 0).astype(np.int64)

    @property
    def reachable_columns(self) -> NDArray[np.bool_]:
        """[Vt] teacher tokens that stand for at least one student token."""
        reachable = np.zeros(self.shape[1], dtype=np.bool_)
        reachable[self.indices] = True
        return reachable

    def row_block(self, start: int, stop: int) -> SparseProjection:
        """Rows ``[start, stop)``, as one shard of the student's vocabulary needs them.

        Rows from Vs on, the padding of a vocabulary that is sharded, are empty.

        Raises:
            ProjectionError: ``start`` below 0 or ``stop`` below ``start``.
        """
        if not 0 <= start <= stop:
            raise ProjectionError(
                "a row block runs backwards", got=(start, stop), expected="0 <= start <= stop"
            )
        bounds = np.minimum(np.arange(start, stop + 1), self.shape[0])
        indptr = self.indptr[bounds]
        entries = slice(int(indptr[0]), int(indptr[-1]))
        is_exact_row = np.zeros(stop - start, dtype=np.bool_)
        inside = self.is_exact_row[start:stop]
        is_exact_row[: len(inside)] = inside
        return SparseProjection(
            indptr=indptr - indptr[0],
            indices=self.indices[entries],
            values=self.values[entries],
            shape=(stop - start, self.shape[1]),
            metadata={**self.metadata, "rows": f"{start}:{stop}"},
            is_exact_row=is_exact_row,
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; it appears under ``path`` whole or not at all.

        Raises:
            ProjectionError: The place cannot be written to.
        """
        from megatron_ext.projection.file import save_projection

        save_projection(self, Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        student: ByteTokenizer | None = None,
        teacher: ByteTokenizer | None = None,
    ) -> SparseProjection:
        """Read what ``save`` wrote.

        Args:
            path: A file that ``save`` wrote.
            student: Where given, the projection must have been built for this tokenizer.
            teacher: The same for the teacher.

        Raises:
            ProjectionError: Missing, truncated or foreign file, or one for another pair.
        """
        from megatron_ext.projection.file import load_projection

        return load_projection(Path(path), student, teacher)

    @classmethod
    def from_tokenizers(
        cls,
        student: ByteTokenizer,
        teacher: ByteTokenizer,
        method: ProjectionMethod = "retokenized",
        top_k: int = 4,
    ) -> SparseProjection:
        """Build the projection of a pair from the two vocabularies alone.

        Args:
            student: Tokenizer of the rows.
            teacher: Tokenizer of the columns.
            method: ``exact`` fills the rows of tokens that both have; ``retokenized`` also spells
                every other student token with the teacher's tokens.
            top_k: Most teacher tokens in a row.

        Raises:
            UnknownNameError: No such method.
            ProjectionError: ``top_k`` below 1.
        """
        from megatron_ext.projection.builders import build_projection

        return build_projection(student, teacher, method=method, top_k=top_k)

"""``SparseProjection``: a projection between two vocabularies, built, chained, saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.projection.builder import build_matrix
from megatron_ext.projection.combination import compose
from megatron_ext.projection.file import load_matrix, save_matrix
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.speller import PIECE_DECAY, ProjectionMethod, ProjectionOptions

if TYPE_CHECKING:
    from typing_extensions import Self

    from megatron_ext.tokenizers.base import ByteTokenizer


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SparseProjection(ProjectionMatrix):
    """Projection that is built from tokenizers, chained, saved and loaded.

    Data, checks and algebra are those of ``ProjectionMatrix``, which lower modules take and return.
    """

    @classmethod
    def of(cls, matrix: ProjectionMatrix) -> Self:
        """Wrap the arrays and metadata of ``matrix``."""
        return cls(**{entry.name: getattr(matrix, entry.name) for entry in fields(matrix)})

    @classmethod
    def from_tokenizers(
        cls,
        student: ByteTokenizer,
        teacher: ByteTokenizer,
        method: ProjectionMethod = "retokenized",
        top_k: int = 4,
        *,
        pieces: int | None = None,
        decay: float = PIECE_DECAY,
        reverse_pass: bool = False,
        control_similarity: float | None = None,
    ) -> Self:
        """Build the projection of a pair from the two vocabularies alone.

        Args:
            student: Tokenizer of the rows.
            teacher: Tokenizer of the columns.
            method: ``exact``, ``retokenized``, ``first_piece`` or ``mined``; all options are
                described in ``ProjectionOptions``.
            top_k: Most teacher tokens in a row.
            pieces: Most pieces of a spelling that count; ``top_k`` where None.
            decay: Weight of each piece of a spelling, relative to the one before it.
            reverse_pass: Also spell the tokens that the student lacks.
            control_similarity: Least similarity of the names of control tokens without a match.

        Raises:
            UnknownNameError: Unknown method.
            ProjectionError: An invalid number, or options that exclude each other.
        """
        options = ProjectionOptions(
            method=method,
            top_k=top_k,
            pieces=pieces,
            decay=decay,
            reverse_pass=reverse_pass,
            control_similarity=control_similarity,
        )
        return cls.of(build_matrix(student, teacher, options))

    @classmethod
    def load(
        cls,
        path: str | Path,
        student: ByteTokenizer | None = None,
        teacher: ByteTokenizer | None = None,
        *,
        tell: Callable[[str], None] = warnings.warn,
    ) -> Self:
        """Read what ``save`` wrote, or a ``.pt`` file of NeMo RL's tools or of ours.

        Args:
            path: The file; its kind is told by its first bytes.
            student: Where given, the projection must have been built for this tokenizer.
            teacher: The same for the teacher.
            tell: Called with a line for each property of a ``.pt`` file that cannot be checked, or
                differs from a projection built here.

        Raises:
            ProjectionError: Missing, truncated or foreign file, one for another pair, or a ``.pt``
                file with mass in wrong places.
            MissingDependencyError: safetensors is not installed; torch, for a ``.pt`` file.
        """
        return cls.of(load_matrix(Path(path), student, teacher, tell))

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; it appears under ``path`` whole or not at all.

        Raises:
            ProjectionError: The file cannot be written.
            MissingDependencyError: safetensors is not installed.
        """
        save_matrix(self, Path(path))

    def __matmul__(self, other: SparseProjection) -> SparseProjection:
        """Student to pivot to teacher; see ``combination.compose``."""
        if not isinstance(other, SparseProjection):
            return NotImplemented
        return compose(self, other)

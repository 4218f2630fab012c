"""Layouts that put the common tokens of two vocabularies side by side on each rank.

Vs Vt vocabularies, R tensor-parallel ranks, E entries of a projection. A layout file is one JSON
file that names the pair of vocabularies it is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.files import read_json
from megatron_ext.projection.compressed_rows import write_projection
from megatron_ext.projection.layout.layout_builder import build_layouts
from megatron_ext.projection.layout.packing import VocabularyOrder
from megatron_ext.projection.projection_matrix import ProjectionMatrix

if TYPE_CHECKING:
    from megatron_ext.tokenizers.base import ByteTokenizer

FORMAT: Final = "megatron-ext-vocabulary-layout"
FORMAT_VERSION: Final = 1
_REBUILD: Final = "make it again: VocabularyLayout.of(projection, ...)"


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyLayout:
    """Orders of the student's and of a teacher's vocabulary, for one number of ranks.

    On every rank the student's local order is [common | residual | no entry | padding] and the
    teacher's [common | other reachable | unreachable | padding]. The first ``common_counts[r]``
    local columns of rank ``r`` are the same token on both sides.
    """

    student: VocabularyOrder

    teacher: VocabularyOrder

    common_counts: tuple[int, ...]
    """[R]"""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints and sizes of the two vocabularies, where the projection knows them."""

    def __post_init__(self) -> None:
        ranks = self.student.rank_count
        narrower = min(self.student.width, self.teacher.width)
        if (
            self.teacher.rank_count != ranks
            or len(self.common_counts) != ranks
            or not all(0 <= count <= narrower for count in self.common_counts)
        ):
            raise ProjectionError(
                "the two sides of a vocabulary layout do not fit together",
                got=f"{ranks} and {self.teacher.rank_count} ranks, {len(self.common_counts)} "
                f"counts of common tokens up to {max(self.common_counts, default=0)}",
                expected=f"equally many ranks, and counts of at most {narrower}",
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VocabularyLayout):
            return NotImplemented
        return (self.student, self.teacher, self.common_counts, self.metadata) == (
            other.student,
            other.teacher,
            other.common_counts,
            other.metadata,
        )

    @property
    def rank_count(self) -> int:
        """R"""
        return self.student.rank_count

    @classmethod
    def of(
        cls,
        projection: ProjectionMatrix,
        *,
        rank_count: int,
        student_size: int,
        teacher_size: int,
    ) -> VocabularyLayout:
        """Build the layout of a pair; deterministic.

        Args:
            projection: Projection of the pair, in the tokenizers' order.
            rank_count: Tensor-parallel ranks.
            student_size: Rows of the student's head, padding included; a multiple of the ranks.
            teacher_size: Rows of the teacher's head.

        Raises:
            ProjectionError: A head that is smaller than its vocabulary or does not divide.
        """
        return cls.of_several(
            [projection],
            rank_count=rank_count,
            student_size=student_size,
            teacher_sizes=[teacher_size],
        )[0]

    @classmethod
    def of_several(
        cls,
        projections: Sequence[ProjectionMatrix],
        *,
        rank_count: int,
        student_size: int,
        teacher_sizes: Sequence[int],
    ) -> tuple[VocabularyLayout, ...]:
        """Build a layout for each teacher, with one order of the student, that of the first pair.

        Tokens that the student has in common with every teacher are first on each rank, so that
        ``common_counts`` of any pair is at least their number, unless a teacher's head is so much
        smaller that they do not fit there. A later teacher's other common tokens are on their
        partner's rank, but not at its place: ``VocabularyPartition.permuted`` gives their places.

        Raises:
            ProjectionError: As ``of``; no projection, or projections of several students.
        """
        return build_layouts(
            cls,
            projections,
            rank_count=rank_count,
            student_size=student_size,
            teacher_sizes=teacher_sizes,
        )

    def check_sizes(self, student_count: int, teacher_count: int) -> None:
        """Check sizes of vocabularies against those of this layout.

        Raises:
            ProjectionError: A size differs from the layout's.
        """
        expected = (self.student.vocab_size, self.teacher.vocab_size)
        if (student_count, teacher_count) != expected:
            raise ProjectionError(
                "the vocabulary layout is of another pair",
                got=f"{student_count} student and {teacher_count} teacher tokens",
                expected=f"{expected[0]} and {expected[1]}",
                fix="make the layout of this projection: VocabularyLayout.of(projection, ...)",
            )

    def save(self, path: str | Path) -> None:
        """Write a JSON file; it appears under ``path`` whole or not at all.

        Raises:
            ProjectionError: The file cannot be written.
        """
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "metadata": dict(self.metadata),
            "common_counts": list(self.common_counts),
            **{
                side: {"vocab_size": order.vocab_size, "ids": order.ids.tolist()}
                for side, order in (("student", self.student), ("teacher", self.teacher))
            },
        }
        written = f"{json.dumps(content)}\n".encode()
        write_projection(Path(path), written, what="the vocabulary layout")

    @classmethod
    def load(
        cls,
        path: str | Path,
        student: ByteTokenizer | None = None,
        teacher: ByteTokenizer | None = None,
    ) -> VocabularyLayout:
        """Read what ``save`` wrote.

        Args:
            student: Where given, the layout must be of this tokenizer's vocabulary.
            teacher: The same for the teacher.

        Raises:
            ProjectionError: Missing, broken or foreign file, or one for another pair.
        """
        file = Path(path)
        content = _read(file)
        for role, tokenizer in (("student", student), ("teacher", teacher)):
            if tokenizer is not None:
                _check_built_for(file, content, role, tokenizer.fingerprint())
        try:
            counts = tuple(content["common_counts"])
            student_order, teacher_order = (
                VocabularyOrder(
                    ids=content[side]["ids"],
                    vocab_size=content[side]["vocab_size"],
                    rank_count=len(counts),
                )
                for side in ("student", "teacher")
            )
            return cls(
                student=student_order,
                teacher=teacher_order,
                common_counts=counts,
                metadata=content["metadata"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProjectionError(
                "the file is not a complete vocabulary layout", where=file, got=error, fix=_REBUILD
            ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ProjectionError(
            "the vocabulary layout cannot be read", where=path, got=error, fix=_REBUILD
        ) from error
    file_format = content.get("format") if isinstance(content, dict) else None
    if file_format != FORMAT or content.get("format_version") != FORMAT_VERSION:
        raise ProjectionError(
            "the file is not a vocabulary layout that this version reads",
            where=path,
            got=f"{file_format} version {content.get('format_version')}"
            if file_format
            else "another file",
            expected=f"{FORMAT} version {FORMAT_VERSION}",
            fix=_REBUILD,
        )
    assert isinstance(content, dict)
    return content


def _check_built_for(path: Path, content: dict[str, Any], role: str, given: str) -> None:
    built_for = content.get("metadata", {}).get(f"{role}_fingerprint")
    if built_for != given:
        raise ProjectionError(
            f"this vocabulary layout was made for another {role}",
            where=path,
            got=f"fingerprint {str(built_for)[:12]}" if built_for else "no fingerprint",
            expected=f"{given[:12]}, of the {role} given",
            fix=_REBUILD,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStatistics:
    """Counts of a projection's entries within and across ranks under a layout."""

    common_within: int
    """Number of common pairs that are side by side on a rank."""

    common: int
    """Number of all common pairs."""

    entries_within: int
    """Number of entries whose two tokens are on one rank."""

    entries: int
    """Number of all entries."""

    crossing_columns: int
    """Teacher tokens with an entry on another rank, which ranks exchange for each chunk."""

    common_balance: float
    """Most common pairs of a rank, over the mean."""

    residual_balance: float
    """Most entries of a rank outside its common pairs, over the mean."""

    @classmethod
    def of(cls, projection: ProjectionMatrix, layout: VocabularyLayout) -> LayoutStatistics:
        """Statistics of ``projection``, in the tokenizers' order, under ``layout``."""
        ranks = layout.rank_count
        projection = projection.padded(*projection.vocab_sizes)
        owner = layout.student.rank_of(projection.entry_rows)
        column_owner = layout.teacher.rank_of(projection.indices)
        crosses = owner != column_owner
        counts = np.asarray(layout.common_counts)
        residual = np.bincount(owner, minlength=ranks) - counts
        return cls(
            common_within=int(counts.sum()),
            common=len(projection.partition().common_student),
            entries_within=int((~crosses).sum()),
            entries=projection.entry_count,
            crossing_columns=len(np.unique(projection.indices[crosses])),
            common_balance=_balance(counts),
            residual_balance=_balance(residual),
        )

    @property
    def share_within(self) -> float:
        """Share of the entries whose two tokens are on one rank."""
        return self.entries_within / max(self.entries, 1)


def _balance(counts: NDArray[np.int64]) -> float:
    mean = counts.mean()
    return float(counts.max() / mean) if mean else 1.0

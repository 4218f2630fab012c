"""Builder of vocabulary layouts from projections. Vs Vt vocabularies, R tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.layout.packing import (
    NOWHERE,
    Packing,
    ResidualGraph,
    VocabularyOrder,
    capacities,
    filled,
)
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.projection.vocabulary_partition import VocabularyPartition

if TYPE_CHECKING:
    from megatron_ext.projection.layout.vocabulary_layout import VocabularyLayout

Ids = NDArray[np.int64]

KEPT_METADATA = (
    "student_fingerprint",
    "teacher_fingerprint",
    "student_vocab_size",
    "teacher_vocab_size",
)
"""Metadata of a projection that a layout keeps: the pair that it is for."""

_IN_EVERY_PAIR, _ALONE, _SHARED, _RESIDUAL, _NO_ENTRY = range(5)
"""Keys of tokens on a rank: common pairs of all teachers; common pairs whose column no other row
has; other common pairs; tokens with entries; tokens without."""


def build_layouts(
    layout_class: type[VocabularyLayout],
    projections: Sequence[ProjectionMatrix],
    *,
    rank_count: int,
    student_size: int,
    teacher_sizes: Sequence[int],
) -> tuple[VocabularyLayout, ...]:
    """See ``VocabularyLayout.of_several``."""
    projections = [projection.padded(*projection.vocab_sizes) for projection in projections]
    _check(projections, rank_count, student_size, teacher_sizes)
    room = capacities(projections[0].shape[0], student_size, rank_count)
    first = _Pair.of(projections[0])
    pairs = [first, *(_Pair.of(projection) for projection in projections[1:])]
    student_rank, teacher_rank = first.packed(
        room, capacities(first.teachers, teacher_sizes[0], rank_count)
    )
    key = first.student_key()
    in_every = np.all([pair.is_common for pair in pairs], axis=0)
    if len(pairs) > 1:
        key[in_every] = _IN_EVERY_PAIR
    together = student_rank == teacher_rank[first.partner]
    key[first.is_common & ~together] = _RESIDUAL
    student = VocabularyOrder.by_rank(
        student_rank, key, padded_size=student_size, rank_count=rank_count
    )
    layouts = []
    for pair, size in zip(pairs, teacher_sizes, strict=True):
        if pair is not first:
            teacher_rank = pair.following(student_rank, capacities(pair.teachers, size, rank_count))
        layouts.append(pair.layout(layout_class, student, teacher_rank, size))
    return tuple(layouts)


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """One projection without padding, and quantities derived from it."""

    projection: ProjectionMatrix

    partition: VocabularyPartition

    graph: ResidualGraph

    partner: Ids
    """[Vs] teacher token of each common student token, -1 for others."""

    @classmethod
    def of(cls, projection: ProjectionMatrix) -> _Pair:
        partition = projection.partition()
        partner = np.full(projection.shape[0], -1, dtype=np.int64)
        partner[partition.common_student] = partition.common_teacher
        return cls(projection, partition, ResidualGraph.of(projection, partition), partner)

    @property
    def teachers(self) -> int:
        return self.projection.shape[1]

    @property
    def is_common(self) -> NDArray[np.bool_]:
        """[Vs]"""
        return self.partner >= 0

    def student_key(self) -> Ids:
        """[Vs]"""
        is_shared = self.graph.degree[: len(self.partner)] > 0
        key = np.where(self.projection.reachable_rows, _RESIDUAL, _NO_ENTRY)
        key[self.is_common] = np.where(is_shared, _SHARED, _ALONE)[self.is_common]
        return key

    def packed(self, student_capacity: Ids, teacher_capacity: Ids) -> tuple[Ids, Ids]:
        """Rank of each token, [Vs] and [Vt], the best for this pair."""
        students = len(self.partner)
        packing = Packing(
            self.graph, student_capacity=student_capacity, teacher_capacity=teacher_capacity
        )
        rank = packing.pack()
        teacher_rank = rank[students:].copy()
        teacher_rank[self.partition.common_teacher] = rank[self.partition.common_student]
        return self._filled_student(rank[:students], student_capacity), self._filled_teacher(
            teacher_rank, teacher_capacity
        )

    def following(self, student_rank: Ids, capacity: Ids) -> Ids:
        """Rank of each teacher token [Vt] for given ranks of the student's tokens.

        A common token follows its partner while there is room, lowest student ids first; another
        reachable one goes where most of its entries are.
        """
        ranks = len(capacity)
        common, columns = self.partition.common_teacher, self.projection.indices
        rank = np.full(self.teachers, NOWHERE, dtype=np.int64)
        rank[common] = student_rank[self.partition.common_student]
        other = np.setdiff1d(np.flatnonzero(self.projection.reachable_columns), common)
        cells = columns.astype(np.int64) * ranks + student_rank[self.projection.entry_rows]
        counts = np.bincount(cells, minlength=self.teachers * ranks).reshape(-1, ranks)
        rank[other] = counts[other].argmax(axis=1)
        priority = np.concatenate([common, other])
        for owner, room in enumerate(capacity.tolist()):
            rank[priority[rank[priority] == owner][room:]] = NOWHERE
        return self._filled_teacher(rank, capacity)

    def layout(
        self,
        layout_class: type[VocabularyLayout],
        student: VocabularyOrder,
        teacher_rank: Ids,
        teacher_size: int,
    ) -> VocabularyLayout:
        common, partners = self.partition.common_student, self.partition.common_teacher
        together = student.rank_of(common) == teacher_rank[partners]
        # Common tokens in the student's order, then the others by id.
        key = np.where(self.projection.reachable_columns, 0, self.teachers) + len(student.ids)
        key[partners[together]] = student.places[common[together]]
        teacher = VocabularyOrder.by_rank(
            teacher_rank, key, padded_size=teacher_size, rank_count=student.rank_count
        )
        return layout_class(
            student=student,
            teacher=teacher,
            common_counts=_side_by_side(student, teacher, self.partner),
            metadata={
                name: text
                for name, text in self.projection.metadata.items()
                if name in KEPT_METADATA
            },
        )

    def _filled_student(self, rank: Ids, capacity: Ids) -> Ids:
        members = np.flatnonzero(self.projection.reachable_rows)
        return filled(rank, capacity=capacity, members=members)

    def _filled_teacher(self, rank: Ids, capacity: Ids) -> Ids:
        members = np.flatnonzero(self.projection.reachable_columns)
        return filled(rank, capacity=capacity, members=members)


def _side_by_side(
    student: VocabularyOrder, teacher: VocabularyOrder, partner: Ids
) -> tuple[int, ...]:
    """Number [R] of leading local columns that are one token on both sides."""
    width = min(student.width, teacher.width)
    padded = np.full(len(student.ids), -1, dtype=np.int64)
    padded[: len(partner)] = partner
    ranks = student.rank_count
    students = student.ids.reshape(ranks, -1)[:, :width]
    teachers = teacher.ids.reshape(ranks, -1)[:, :width]
    apart = padded[students] != teachers
    ends = np.where(apart.any(axis=1), apart.argmax(axis=1), width)
    return tuple(ends.tolist())


def _check(
    projections: Sequence[ProjectionMatrix],
    rank_count: int,
    student_size: int,
    teacher_sizes: Sequence[int],
) -> None:
    if not projections or len({projection.shape[0] for projection in projections}) > 1:
        raise ProjectionError(
            "a vocabulary layout is of one student and its teachers",
            got=f"projections of {[projection.shape for projection in projections]}",
            expected="at least one, all with the same number of student tokens",
        )
    sides = [(student_size, projections[0].shape[0])]
    sides += [
        (size, projection.shape[1])
        for size, projection in zip(teacher_sizes, projections, strict=True)
    ]
    for size, vocab_size in sides:
        if rank_count < 1 or size % rank_count or size < vocab_size:
            raise ProjectionError(
                "a head cannot be laid out over its ranks",
                got=f"{size} rows over {rank_count} ranks",
                expected=f"a multiple of the ranks that holds {vocab_size} tokens",
                fix="give the padded size that the model is built with",
            )

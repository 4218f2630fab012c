"""Alignment of one pair of token sequences, and counts of its chunks. T tokens, C chunks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK


class ChunkClass(IntEnum):
    """Number of student to teacher tokens; bit 1 is set for many of the student's, bit 0 for many
    of the teacher's.

    A token that covers no byte is in no chunk and does not count, even where a span runs over it.
    """

    ONE_TO_ONE = 0
    ONE_TO_MANY = 1
    MANY_TO_ONE = 2
    MANY_TO_MANY = 3


CHUNK_KINDS: Final = tuple(kind.name.lower() for kind in ChunkClass)
"""Names of the classes, by number; those of the fields of ``ChunkCounts`` and of metrics."""


def chunk_classes(
    student_chunk_id: NDArray[np.integer],
    teacher_chunk_id: NDArray[np.integer],
    chunk_count: int,
) -> NDArray[np.int8]:
    """``ChunkClass`` of each chunk [C], from chunk ids of any shape with ids below C."""
    is_many = [
        np.bincount(ids[ids != NO_CHUNK], minlength=chunk_count) > 1
        for ids in (student_chunk_id, teacher_chunk_id)
    ]
    classes: NDArray[np.int8] = 2 * is_many[0].astype(np.int8) + is_many[1].astype(np.int8)
    return classes


@dataclass(frozen=True)
class Alignment:
    """Chunks of student and teacher tokens that cover the same bytes.

    Chunk ``c`` pairs the half-open token spans ``student_spans[c]`` and ``teacher_spans[c]``.
    Chunks are minimal: no cut inside one would fall on a token boundary of both sides. Derived
    attributes are computed on first use.
    """

    student_spans: NDArray[np.int32]
    """[C, 2] first token and one past the last token of each chunk."""

    teacher_spans: NDArray[np.int32]
    """[C, 2]"""

    is_exact: NDArray[np.bool_]
    """[C] chunks whose spans hold equal bytes, or control tokens with the same meaning."""

    student_chunk_id: NDArray[np.int32]
    """[Ts] chunk of each student token, ``NO_CHUNK`` where it is in none."""

    teacher_chunk_id: NDArray[np.int32]
    """[Tt]"""

    @property
    def chunk_count(self) -> int:
        """C."""
        return len(self.is_exact)

    @cached_property
    def chunk_class(self) -> NDArray[np.int8]:
        """[C] ``ChunkClass`` of each chunk."""
        return chunk_classes(self.student_chunk_id, self.teacher_chunk_id, self.chunk_count)

    @cached_property
    def student_is_chunk_start(self) -> NDArray[np.bool_]:
        """[Ts] tokens that are the first of their chunk."""
        return _marked(self.student_spans[:, 0], len(self.student_chunk_id))

    @cached_property
    def teacher_is_chunk_start(self) -> NDArray[np.bool_]:
        """[Tt]"""
        return _marked(self.teacher_spans[:, 0], len(self.teacher_chunk_id))


def _marked(where: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
    marks = np.zeros(length, dtype=np.bool_)
    marks[where] = True
    return marks


@dataclass(kw_only=True, frozen=True, slots=True)
class ChunkCounts:
    """Chunks by the number of student and teacher tokens in them, and the tokens in none.

    A token that covers no byte is in no chunk, even where a span runs over it.
    """

    one_to_one: int = 0
    """One student token is one teacher token."""

    one_to_many: int = 0
    """One student token is several teacher tokens."""

    many_to_one: int = 0
    """Several student tokens are one teacher token."""

    many_to_many: int = 0
    """Several on both sides, and no common boundary between them."""

    student_unaligned: int = 0
    """Student tokens in no chunk."""

    teacher_unaligned: int = 0
    """Teacher tokens in no chunk."""

    @classmethod
    def of(cls, alignment: Alignment) -> ChunkCounts:
        """The counts of one alignment."""
        student_id, teacher_id = alignment.student_chunk_id, alignment.teacher_chunk_id
        return cls.of_classes(
            alignment.chunk_class,
            student_unaligned=int(np.count_nonzero(student_id == NO_CHUNK)),
            teacher_unaligned=int(np.count_nonzero(teacher_id == NO_CHUNK)),
        )

    @classmethod
    def of_classes(
        cls, chunk_class: NDArray[np.int8], *, student_unaligned: int, teacher_unaligned: int
    ) -> ChunkCounts:
        """The counts of chunks by their ``ChunkClass`` [C]."""
        sizes = np.bincount(chunk_class, minlength=len(ChunkClass)).tolist()
        return cls(
            **dict(zip(CHUNK_KINDS, sizes, strict=True)),
            student_unaligned=student_unaligned,
            teacher_unaligned=teacher_unaligned,
        )

    def __add__(self, other: ChunkCounts) -> ChunkCounts:
        return ChunkCounts(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(ChunkCounts)
            }
        )

    @property
    def chunks(self) -> int:
        """Chunks of any size."""
        return self.one_to_one + self.one_to_many + self.many_to_one + self.many_to_many

    def shares(self) -> dict[str, float]:
        """Share of each size among the chunks, by field name; empty where there is no chunk."""
        if not self.chunks:
            return {}
        return {name: getattr(self, name) / self.chunks for name in CHUNK_KINDS}


def spans_of(chunk_id: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """First token and one past the last [C, 2] of each chunk."""
    spans = np.empty((count, 2), dtype=np.int32)
    inside = np.flatnonzero(chunk_id != NO_CHUNK)
    spans[chunk_id[inside[::-1]], 0] = inside[::-1]
    spans[chunk_id[inside], 1] = inside + 1
    return spans


def tokens_per_chunk(chunk_id: NDArray[np.int32], chunk_count: int) -> NDArray[np.int64]:
    """Number of tokens of one side in each chunk [C]; tokens in no chunk do not count."""
    return np.bincount(chunk_id[chunk_id != NO_CHUNK], minlength=chunk_count)

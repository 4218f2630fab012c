"""How much of a text aligns token to token: what to know of a pair before training on it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.chunk_class import ChunkClass
from megatron_ext.constants import NO_CHUNK


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
        """The counts of chunks of known ``ChunkClass`` [C]."""
        sizes = np.bincount(chunk_class, minlength=len(ChunkClass)).tolist()
        return cls(
            one_to_one=sizes[ChunkClass.ONE_TO_ONE],
            one_to_many=sizes[ChunkClass.ONE_TO_MANY],
            many_to_one=sizes[ChunkClass.MANY_TO_ONE],
            many_to_many=sizes[ChunkClass.MANY_TO_MANY],
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
        names = ("one_to_one", "one_to_many", "many_to_one", "many_to_many")
        if not self.chunks:
            return {}
        return {name: getattr(self, name) / self.chunks for name in names}


def tokens_per_chunk(chunk_id: NDArray[np.int32], chunk_count: int) -> NDArray[np.int64]:
    """Tokens of one side in each chunk [C]; those that are in none do not count."""
    return np.bincount(chunk_id[chunk_id != NO_CHUNK], minlength=chunk_count)

"""How much of a text aligns token to token: what to know of a pair before training on it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
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
        student_size = tokens_per_chunk(alignment.student_chunk_id, alignment.chunk_count)
        teacher_size = tokens_per_chunk(alignment.teacher_chunk_id, alignment.chunk_count)
        one_student, one_teacher = student_size == 1, teacher_size == 1
        return cls(
            one_to_one=int(np.count_nonzero(one_student & one_teacher)),
            one_to_many=int(np.count_nonzero(one_student & ~one_teacher)),
            many_to_one=int(np.count_nonzero(~one_student & one_teacher)),
            many_to_many=int(np.count_nonzero(~one_student & ~one_teacher)),
            student_unaligned=len(alignment.student_chunk_id) - int(student_size.sum()),
            teacher_unaligned=len(alignment.teacher_chunk_id) - int(teacher_size.sum()),
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

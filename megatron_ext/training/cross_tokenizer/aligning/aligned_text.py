"""One text as the student and every teacher read it.

Ts student tokens, Tt teacher tokens, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """What a teacher with another tokenizer makes of the text."""

    ids: Ids
    """[Tt]"""

    student_chunk_id: Ids
    """[Ts] chunk of each student token, in order from 0, ``NO_CHUNK`` where it is in none."""

    teacher_chunk_id: Ids
    """[Tt]"""

    def part(self, student: slice, teacher: slice) -> TeacherTokens:
        """Some tokens, which are whole chunks; these count from 0 again."""
        student_chunk_id = self.student_chunk_id[student]
        inside = student_chunk_id[student_chunk_id != NO_CHUNK]
        first = inside[0] if len(inside) else 0
        return TeacherTokens(
            self.ids[teacher],
            _counted_from(student_chunk_id, first),
            _counted_from(self.teacher_chunk_id[teacher], first),
        )


@dataclass(frozen=True, slots=True)
class AlignedText:
    """A text, or a part of one that begins and ends where a token of each model does."""

    student_ids: Ids
    """[Ts]"""

    student_widths: Ids
    """[Ts] bytes of the text that each token covers."""

    teachers: tuple[TeacherTokens, ...]
    """One for each teacher that has another tokenizer than the student."""

    is_end: bool = True
    """Whether the text ends here."""

    @property
    def byte_count(self) -> int:
        """Bytes of the text."""
        return int(self.student_widths.sum())

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of the student and of each teacher."""
        return len(self.student_ids), *(len(teacher.ids) for teacher in self.teachers)

    def part(self, bounds: tuple[slice, ...], *, is_end: bool) -> AlignedText:
        """Some tokens of each model, which stand for the same bytes.

        Args:
            bounds: Of the student, and of each teacher.
            is_end: Whether the text ends with them.
        """
        student, *others = bounds
        teachers = zip(self.teachers, others, strict=True)
        return replace(
            self,
            student_ids=self.student_ids[student],
            student_widths=self.student_widths[student],
            teachers=tuple(teacher.part(student, other) for teacher, other in teachers),
            is_end=self.is_end and is_end,
        )


def _counted_from(chunk_id: Ids, first: int) -> Ids:
    return np.where(chunk_id == NO_CHUNK, np.int32(NO_CHUNK), chunk_id - np.int32(first))

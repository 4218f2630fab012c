"""One text, or conversation, as the student and every teacher read it.

Ts student tokens, Tt teacher tokens, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_places import Marks

Ids = NDArray[np.integer[Any]]

Trained = NDArray[np.bool_] | None
"""[T] tokens that are trained; None for all."""


class TeacherTokens(NamedTuple):
    """What a teacher with another tokenizer makes of the text."""

    ids: Ids
    """[Tt]"""

    student_marks: Marks
    """[Ts] the chunks, on the student's side."""

    teacher_marks: Marks
    """[Tt] the chunks, on its own."""

    trained: Trained = None
    """[Tt] which of its tokens are its answers; None in a text."""


class AlignedText(NamedTuple):
    """A text, or a part of one that begins and ends where a token of each model does."""

    student_ids: Ids
    """[Ts]"""

    student_widths: Ids
    """[Ts] bytes of the text that each token covers."""

    teachers: tuple[TeacherTokens, ...]
    """One for each teacher that has another tokenizer than the student."""

    is_end: bool = True
    """Whether the text ends here."""

    trained: Trained = None
    """[Ts] which tokens of a conversation are trained; None in a text, of which all are. A
    conversation brings what begins and ends it; around a text that is put when it is read."""

    @property
    def is_conversation(self) -> bool:
        """Whether templates wrote it."""
        return self.trained is not None

    @property
    def byte_count(self) -> int:
        """Bytes of the text; of a conversation, of what the student's template wrote."""
        return int(self.student_widths.sum())

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of the student and of each teacher."""
        return len(self.student_ids), *(len(teacher.ids) for teacher in self.teachers)

    def part(self, bounds: Sequence[slice], *, is_end: bool) -> AlignedText:
        """Some tokens of each model, which stand for the same bytes.

        Args:
            bounds: Of the student, and of each teacher.
            is_end: Whether the text ends with them.
        """
        student, *others = bounds
        return AlignedText(
            self.student_ids[student],
            self.student_widths[student],
            tuple(
                TeacherTokens(
                    teacher.ids[own],
                    teacher.student_marks[student],
                    teacher.teacher_marks[own],
                    _part(teacher.trained, own),
                )
                for teacher, own in zip(self.teachers, others, strict=True)
            ),
            is_end=self.is_end and is_end,
            trained=_part(self.trained, student),
        )


def byte_count_of(texts: Sequence[AlignedText]) -> int:
    """Bytes of all texts; quicker than of each."""
    widths = [text.student_widths for text in texts]
    return int(np.concatenate([np.zeros(0, np.int64), *widths]).sum())


def _part(trained: Trained, bounds: slice) -> Trained:
    return None if trained is None else trained[bounds]

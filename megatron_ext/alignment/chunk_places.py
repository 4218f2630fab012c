"""Where the chunks of one side are in a flat row. P tokens that are in a chunk, C chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.chunk_marks import BEGINS, INSIDE, OUTSIDE, Marks, ids_of_marks
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Positions of each chunk; one in between can be in no chunk."""

    first: NDArray[np.int64]
    """[C]"""

    stop: NDArray[np.int64]
    """[C] one past the last."""

    is_many: NDArray[np.bool_]
    """[C] chunks of more than one token."""

    @classmethod
    def of_ids(cls, chunk_id: NDArray[np.int64], *, side: str) -> ChunkPlaces:
        """The places of chunk ids in any order.

        Raises:
            AlignmentError: Ids that leave a number out.
        """
        position = np.flatnonzero(chunk_id != NO_CHUNK)
        ids = chunk_id[position]
        steps = np.diff(ids, prepend=NO_CHUNK)
        if steps.min(initial=0) < 0:
            order = np.argsort(ids, kind="stable")
            position, ids = position[order], ids[order]
            steps = np.diff(ids, prepend=NO_CHUNK)
        if steps.max(initial=0) > 1:
            raise left_out(int(ids[np.argmax(steps > 1)]) - 1, side=side)
        return cls._of_tokens(position, np.flatnonzero(steps))

    @classmethod
    def of_marks(cls, marks: Marks, *, side: str) -> ChunkPlaces:
        """The places of marks.

        Raises:
            AlignmentError: Marks that go on with a chunk before any begins.
        """
        first = np.flatnonzero(marks >= BEGINS)
        goes_on = np.append(marks[1:] == INSIDE, False)
        stop = np.flatnonzero((marks != OUTSIDE) & ~goes_on)
        stop += 1
        # Each chunk has an end at least, and so has what goes on before any begins.
        if len(stop) == len(first):
            return cls(first, stop, stop - first > 1)
        position = np.flatnonzero(marks != OUTSIDE)
        if marks[position[0]] < BEGINS:
            raise AlignmentError(
                f"the {side}'s marks go on with a chunk that none begins",
                got=f"position {int(position[0])}",
                fix="cut marks where a chunk begins",
            )
        return cls._of_tokens(position, np.flatnonzero(marks[position] >= BEGINS))

    def __len__(self) -> int:
        """C."""
        return len(self.first)

    @property
    def spans(self) -> NDArray[np.int64]:
        """[C, 2] first position of each chunk and one past its last."""
        return np.stack([self.first, self.stop], axis=1)

    @classmethod
    def _of_tokens(cls, position: NDArray[np.int64], begin: NDArray[np.int64]) -> ChunkPlaces:
        """The places of all tokens [P], chunk after chunk, of which ``begin`` [C] begin one."""
        end = np.append(begin[1:], len(position))[: len(begin)]
        return cls(position[begin], position[end - 1] + 1, end - begin > 1)


def alignment_of(student_marks: Marks, teacher_marks: Marks) -> Alignment:
    """The alignment that marks [Ts] and [Tt] stand for."""
    student = ChunkPlaces.of_marks(student_marks, side="student")
    teacher = ChunkPlaces.of_marks(teacher_marks, side="teacher")
    return Alignment(
        student_spans=student.spans.astype(np.int32),
        teacher_spans=teacher.spans.astype(np.int32),
        is_exact=student_marks[student.first] == BEGINS,
        student_chunk_id=ids_of_marks(student_marks, np.int32),
        teacher_chunk_id=ids_of_marks(teacher_marks, np.int32),
    )


def left_out(chunk: int, *, side: str) -> AlignmentError:
    """What is wrong with a side that has no token of ``chunk``."""
    return AlignmentError(
        f"the {side}'s chunk ids leave a chunk out",
        got=f"no position of chunk {chunk}",
        expected="each chunk on both sides, numbered from 0",
    )

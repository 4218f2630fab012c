"""Chunks as a byte a token, which says the same wherever the tokens stand. T tokens.

Chunk ids count from some first chunk, so that rows of them are renumbered whenever they are cut or
put together. Marks are not: chunk ``c`` is what begins with the ``c``-th mark of each side that is
``BEGINS`` or more.
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.constants import NO_CHUNK

Marks = NDArray[np.uint8]
Number = TypeVar("Number", np.int32, np.int64)

OUTSIDE: Final = 0
"""In no chunk."""

INSIDE: Final = 1
"""In the chunk that was begun last."""

BEGINS: Final = 2
"""The first token of a chunk."""

BEGINS_UNEQUAL: Final = 3
"""The first token of a chunk whose sides spell different bytes."""


def chunk_marks(alignment: Alignment) -> tuple[Marks, Marks]:
    """The marks of both sides [Ts], [Tt]."""
    sides = (
        (alignment.student_chunk_id, alignment.student_spans),
        (alignment.teacher_chunk_id, alignment.teacher_spans),
    )
    student, teacher = (_marks(*side, alignment.is_exact) for side in sides)
    return student, teacher


def ids_of_marks(marks: Marks, kind: type[Number]) -> NDArray[Number]:
    """The chunk ids that marks of any shape stand for, counted from 0 in their flat order."""
    chunk_id = np.cumsum(marks.reshape(-1) >= BEGINS, dtype=kind)
    chunk_id -= 1
    np.copyto(chunk_id, NO_CHUNK, where=marks.reshape(-1) == OUTSIDE)
    return chunk_id.reshape(marks.shape)


def without_chunks(marks: Marks, dropped: NDArray[np.bool_]) -> Marks:
    """The same with some chunks undone.

    Args:
        marks: [T]
        dropped: [C] which of its chunks.
    """
    chunk_of = np.cumsum(marks >= BEGINS) - 1
    kept: Marks = marks.copy()
    kept[(marks != OUTSIDE) & np.append(dropped, False)[chunk_of]] = OUTSIDE
    return kept


def _marks(
    chunk_id: NDArray[np.int32], spans: NDArray[np.int32], is_exact: NDArray[np.bool_]
) -> Marks:
    marks: Marks = (chunk_id != NO_CHUNK).astype(np.uint8)
    marks[spans[:, 0]] = np.where(is_exact, BEGINS, BEGINS_UNEQUAL)
    return marks

"""The alignment of one sequence pair. T tokens, C chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_class import chunk_classes


@dataclass(frozen=True)
class Alignment:
    """Which student tokens and which teacher tokens cover the same bytes.

    Chunk ``c`` pairs the half-open token spans ``student_spans[c]`` and ``teacher_spans[c]``.
    Chunks are minimal: no cut inside one would fall on a token boundary of both sides. What follows
    from the fields is computed when it is first asked for.
    """

    student_spans: NDArray[np.int32]
    """[C, 2] first token and one past the last token of each chunk."""

    teacher_spans: NDArray[np.int32]
    """[C, 2]"""

    is_exact: NDArray[np.bool_]
    """[C] the two spans hold equal bytes, or control tokens that stand for the same thing."""

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

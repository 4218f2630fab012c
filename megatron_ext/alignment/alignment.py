"""The alignment of one sequence pair. B batch, T tokens, C chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which student tokens and which teacher tokens cover the same bytes.

    Chunk ``c`` pairs the half-open token spans ``student_spans[c]`` and ``teacher_spans[c]``.
    Chunks are minimal: no cut inside one would fall on a token boundary of both sides.
    """

    student_spans: NDArray[np.int32]
    """[C, 2] first token and one past the last token of each chunk."""

    teacher_spans: NDArray[np.int32]
    """[C, 2]"""

    is_exact: NDArray[np.bool_]
    """[C] the two spans hold equal bytes."""

    student_chunk_id: NDArray[np.int32]
    """[Ts] chunk of each student token, ``NO_CHUNK`` where it is in none."""

    teacher_chunk_id: NDArray[np.int32]
    """[Tt]"""

    @property
    def chunk_count(self) -> int:
        """C."""
        return len(self.is_exact)

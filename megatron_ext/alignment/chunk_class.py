"""How many tokens a chunk has on either side. T tokens, C chunks."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK


class ChunkClass(IntEnum):
    """Student tokens to teacher tokens; bit 1 says many of the student's, bit 0 of the teacher's.

    A token that covers no byte is in no chunk and does not count, even where a span runs over it.
    """

    ONE_TO_ONE = 0
    ONE_TO_MANY = 1
    MANY_TO_ONE = 2
    MANY_TO_MANY = 3


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

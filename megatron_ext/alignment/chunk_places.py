"""Where the chunks of one side are in a flat row. P tokens that are in a chunk, C chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_marks import BEGINS, OUTSIDE, Marks
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """The tokens of each chunk, chunk after chunk."""

    position: NDArray[np.int64]
    """[P] ascending within each chunk."""

    first: NDArray[np.int64]
    """[C] index of each chunk's first token in ``position``."""

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
        return cls(position, np.flatnonzero(steps))

    @classmethod
    def of_marks(cls, marks: Marks, *, side: str) -> ChunkPlaces:
        """The places of marks.

        Raises:
            AlignmentError: Marks that go on with a chunk before any begins.
        """
        position = np.flatnonzero(marks != OUTSIDE)
        first = np.flatnonzero(marks[position] == BEGINS)
        if len(position) and (not len(first) or first[0]):
            raise AlignmentError(
                f"the {side}'s marks go on with a chunk that none begins",
                got=f"position {int(position[0])}",
                fix="cut marks where a chunk begins",
            )
        return cls(position, first)

    def __len__(self) -> int:
        """C."""
        return len(self.first)

    @property
    def spans(self) -> NDArray[np.int64]:
        """[C, 2] first position of each chunk and one past its last."""
        spans = np.empty((len(self.first), 2), dtype=np.int64)
        np.take(self.position, self.first, out=spans[:, 0])
        spans[:-1, 1] = self.position[self.first[1:] - 1]
        spans[-1:, 1] = self.position[-1:]
        spans[:, 1] += 1
        return spans

    @property
    def is_many(self) -> NDArray[np.bool_]:
        """[C] chunks of more than one token."""
        many: NDArray[np.bool_] = np.diff(self.first, append=len(self.position)) > 1
        return many


def left_out(chunk: int, *, side: str) -> AlignmentError:
    """What is wrong with a side that has no token of ``chunk``."""
    return AlignmentError(
        f"the {side}'s chunk ids leave a chunk out",
        got=f"no position of chunk {chunk}",
        expected="each chunk on both sides, numbered from 0",
    )

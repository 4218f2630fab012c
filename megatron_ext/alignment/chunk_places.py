"""Chunks of one side as one mark per token, as positions, and in label coordinates.

B samples, T tokens, C chunks.

Chunk ids have to be renumbered whenever rows of them are cut or concatenated. Marks do not: chunk
``c`` starts at the ``c``-th mark of each side that is ``BEGINS`` or more.

In label coordinates a sample has a stretch of positions, and its position ``t`` predicts its token
``t + 1``: token 0 is never predicted, and neither is a token past the stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError

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


def outside(length: int) -> Marks:
    """The marks [T] of tokens that are in no chunk."""
    return np.full(length, OUTSIDE, np.uint8)


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
    """A copy of ``marks`` in which the tokens of some chunks are in no chunk.

    Args:
        marks: [T]
        dropped: [C] mask of the chunks to remove.
    """
    chunk_of = np.cumsum(marks >= BEGINS) - 1
    remaining: Marks = marks.copy()
    remaining[(marks != OUTSIDE) & np.append(dropped, False)[chunk_of]] = OUTSIDE
    return remaining


def _marks(
    chunk_id: NDArray[np.int32], spans: NDArray[np.int32], is_exact: NDArray[np.bool_]
) -> Marks:
    marks: Marks = (chunk_id != NO_CHUNK).astype(np.uint8)
    marks[spans[:, 0]] = np.where(is_exact, BEGINS, BEGINS_UNEQUAL)
    return marks


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
            raise missing_chunk(int(ids[np.argmax(steps > 1)]) - 1, side=side)
        return cls._of_tokens(position, np.flatnonzero(steps))

    @classmethod
    def of_marks(cls, marks: Marks, *, side: str) -> ChunkPlaces:
        """The places of marks.

        Raises:
            AlignmentError: Marks that continue a chunk before any begins.
        """
        first = np.flatnonzero(marks >= BEGINS)
        goes_on = np.append(marks[1:] == INSIDE, False)
        stop = np.flatnonzero((marks != OUTSIDE) & ~goes_on)
        stop += 1
        # Each chunk has at least one end, and so have marks that continue before any chunk begins.
        if len(stop) == len(first):
            return cls(first, stop, stop - first > 1)
        position = np.flatnonzero(marks != OUTSIDE)
        if marks[position[0]] < BEGINS:
            raise AlignmentError(
                f"the {side}'s marks continue a chunk that none begins",
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


def missing_chunk(chunk: int, *, side: str) -> AlignmentError:
    """Error about a side that has no token of ``chunk``."""
    return AlignmentError(
        f"the {side}'s chunk ids leave a chunk out",
        got=f"no position of chunk {chunk}",
        expected="each chunk on both sides, numbered from 0",
    )


ChunkIds = NDArray[np.int32]


@dataclass(frozen=True)
class Stretches:
    """Stretches of label positions of all samples, in one flat row."""

    starts: NDArray[np.int64]
    """[B] first position of each sample."""

    lengths: NDArray[np.int64]
    """[B] positions of each sample."""

    total: int
    """Positions of the whole row."""

    @classmethod
    def padded(cls, count: int, length: int) -> Stretches:
        """``count`` samples of ``length`` positions each."""
        starts = np.arange(count, dtype=np.int64) * length
        return cls(starts, np.full(count, length, dtype=np.int64), count * length)

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> Stretches:
        """Samples of ``lengths`` positions, concatenated."""
        sizes = np.array(lengths, dtype=np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes, int(sizes.sum()))


class LabelledSide:
    """The tokens of one side that are in a chunk, at the label positions that predict them.

    Args:
        rows: B rows of chunk ids [T], each from 0.
        stretches: Where the label positions of each sample are.
        first_ids: [B + 1] offset of the ids of each sample; the last entry is the number of ids.
    """

    def __init__(
        self, rows: Sequence[ChunkIds], stretches: Stretches, first_ids: NDArray[np.int64]
    ) -> None:
        sizes = np.array([len(ids) for ids in rows], dtype=np.int64)
        sample = np.repeat(np.arange(len(rows), dtype=np.int64), sizes)
        token = np.arange(sizes.sum(), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        chunk = np.concatenate([np.empty(0, dtype=np.int64), *rows])
        inside = chunk != NO_CHUNK
        sample, position = sample[inside], token[inside] - 1
        self._chunk = chunk[inside] + first_ids[sample]
        self._position = position + stretches.starts[sample]
        self._is_label = (position >= 0) & (position < stretches.lengths[sample])
        self._id_count = int(first_ids[-1])
        self._total = stretches.total

    @cached_property
    def unseen(self) -> NDArray[np.bool_]:
        """Mask of the ids that do not occur here, or hold a token that is not predicted."""
        unseen = np.ones(self._id_count, dtype=np.bool_)
        unseen[self._chunk] = False
        unseen[self._chunk[~self._is_label]] = True
        return unseen

    def touching(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mask of the ids that have one of the ``marked`` positions of the whole row."""
        touching = np.zeros(self._id_count, dtype=np.bool_)
        hit = marked[self._position[self._is_label]]
        touching[self._chunk[self._is_label][hit]] = True
        return touching

    def label_ids(self, renumbered: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of chunk ids in label coordinates; ``renumbered`` maps old ids to new ones."""
        row = np.full(self._total, NO_CHUNK, dtype=np.int64)
        row[self._position[self._is_label]] = renumbered[self._chunk[self._is_label]]
        return row


def first_ids_of(chunk_ids: Sequence[tuple[ChunkIds, ChunkIds]]) -> NDArray[np.int64]:
    """[B + 1] offsets that make the ids of all samples, each from 0, consecutive."""
    counts = [1 + max(int(ids.max(initial=NO_CHUNK)) for ids in pair) for pair in chunk_ids]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])


def untrained_positions(
    masks: Sequence[NDArray[np.bool_]],
    rows: Sequence[ChunkIds],
    stretches: Stretches,
) -> NDArray[np.bool_]:
    """Mask of the positions of the whole row that the samples' masks do not train.

    Raises:
        AlignmentError: A sample without its mask, or a mask that is too short.
    """
    if len(masks) != len(rows):
        raise AlignmentError(
            "samples and student masks differ in number", got=len(masks), expected=len(rows)
        )
    untrained = np.ones(stretches.total, dtype=np.bool_)
    bounds = zip(stretches.starts.tolist(), stretches.lengths.tolist(), strict=True)
    for sample, (mask, ids, (start, length)) in enumerate(zip(masks, rows, bounds, strict=True)):
        needed = min(len(ids) - 1, length)
        if len(mask) < needed:
            raise AlignmentError(
                f"the student mask of sample {sample} is too short",
                got=f"{len(mask)} positions",
                expected=f"at least {needed}, one for each label",
                fix="shift the mask with the labels: position t is trained on token t + 1",
            )
        taken = min(len(mask), length)
        untrained[start : start + taken] = ~mask[:taken]
    return untrained

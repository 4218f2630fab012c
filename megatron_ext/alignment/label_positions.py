"""Chunk ids of several samples, laid out over label positions. B samples, T tokens, C chunks.

A sample has a stretch of label positions. Its position ``t`` predicts its token ``t + 1``, so that
token 0 is never predicted, and a token past the stretch is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError

ChunkIds = NDArray[np.int32]


@dataclass(frozen=True)
class Stretches:
    """Where the label positions of each sample are, in one flat row."""

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
        """Samples one right behind the other."""
        sizes = np.array(lengths, dtype=np.int64)
        return cls(np.cumsum(sizes) - sizes, sizes, int(sizes.sum()))


class LabelledSide:
    """The tokens of one side that are in a chunk, and where they are predicted.

    Args:
        rows: B rows of chunk ids [T], each from 0.
        stretches: Where the label positions of each sample are.
        first_ids: [B + 1] what is added to the ids of each sample; the last entry is their number.
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
        """Which ids do not occur here, or hold a token that is not predicted."""
        unseen = np.ones(self._id_count, dtype=np.bool_)
        unseen[self._chunk] = False
        unseen[self._chunk[~self._is_label]] = True
        return unseen

    def touching(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which ids have one of the ``marked`` positions of the whole row."""
        touching = np.zeros(self._id_count, dtype=np.bool_)
        hit = marked[self._position[self._is_label]]
        touching[self._chunk[self._is_label][hit]] = True
        return touching

    def laid_out(self, renumbered: NDArray[np.int64]) -> NDArray[np.int64]:
        """The whole row of chunk ids, each as ``renumbered`` says."""
        row = np.full(self._total, NO_CHUNK, dtype=np.int64)
        row[self._position[self._is_label]] = renumbered[self._chunk[self._is_label]]
        return row


def first_ids_of(chunk_ids: Sequence[tuple[ChunkIds, ChunkIds]]) -> NDArray[np.int64]:
    """[B + 1] what makes ids that start at 0 in each sample run on from sample to sample."""
    counts = [1 + max(int(ids.max(initial=NO_CHUNK)) for ids in pair) for pair in chunk_ids]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])


def untrained_positions(
    masks: Sequence[NDArray[np.bool_]],
    rows: Sequence[ChunkIds],
    stretches: Stretches,
) -> NDArray[np.bool_]:
    """Positions of the whole row that the masks of the samples do not train.

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

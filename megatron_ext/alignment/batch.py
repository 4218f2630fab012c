"""Alignments of one microbatch as tensors. B batch, T tokens, C chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError

ChunkIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AlignmentBatch:
    """Chunk ids in label coordinates: position ``t`` holds the chunk of the token it predicts.

    Ids run from 0 over the whole microbatch (not per sample), so that one segment sum serves all of
    it, and ``chunk_count`` is known on the host, so that no kernel waits for it.
    """

    student_chunk_id: torch.Tensor
    """[B, Ts] int64: chunk of ``labels[b, t]``, ``NO_CHUNK`` where that token is in none."""

    teacher_chunk_id: torch.Tensor
    """[B, Tt] int64"""

    chunk_count: int
    """C: every id in ``[0, C)`` occurs at least once on both sides."""

    def to(self, device: torch.device | str) -> AlignmentBatch:
        """The same batch on ``device``."""
        return AlignmentBatch(
            student_chunk_id=self.student_chunk_id.to(device, non_blocking=True),
            teacher_chunk_id=self.teacher_chunk_id.to(device, non_blocking=True),
            chunk_count=self.chunk_count,
        )


def pad_alignments(
    chunk_ids: Sequence[tuple[ChunkIds, ChunkIds]],
    *,
    student_length: int,
    teacher_length: int,
    student_masks: Sequence[NDArray[np.bool_]] | None = None,
) -> AlignmentBatch:
    """The batch of per-sample chunk ids in token coordinates.

    Position ``t`` of the result holds the chunk of token ``t + 1``. Token 0 is never predicted and
    a token past the padded length is never seen, so a chunk that holds one of them on either side
    is dropped on both; the others are renumbered without gaps, samples one after the other.

    Args:
        chunk_ids: B pairs of student [Ts] and teacher [Tt] int32 ids, as an ``Alignment`` has them.
        student_length: Label positions of a padded student row.
        teacher_length: Label positions of a padded teacher row.
        student_masks: B rows of bool, True where the label position is trained; at least as many as
            the sample has label positions. A chunk with an untrained student position is dropped.

    Returns:
        int64 ids [B, student_length] and [B, teacher_length] on the CPU.

    Raises:
        AlignmentError: A sample without its mask, or a mask that is too short.
    """
    offsets = np.zeros(len(chunk_ids) + 1, dtype=np.int64)
    for row, pair in enumerate(chunk_ids):
        offsets[row + 1] = offsets[row] + 1 + max(int(ids.max(initial=NO_CHUNK)) for ids in pair)
    student = _flatten([pair[0] for pair in chunk_ids], offsets, student_length)
    teacher = _flatten([pair[1] for pair in chunk_ids], offsets, teacher_length)
    dropped = np.zeros(offsets[-1], dtype=np.bool_)
    for side in (student, teacher):
        occurs = np.zeros_like(dropped)
        occurs[side.chunk] = True
        dropped |= ~occurs
        dropped[side.chunk[~side.is_label]] = True
    if student_masks is not None:
        trained = _flatten_masks(student_masks, chunk_ids, student_length)
        labelled = student.is_label
        untrained = ~trained[student.row[labelled], student.position[labelled]]
        dropped[student.chunk[labelled][untrained]] = True
    renumbered = np.where(dropped, NO_CHUNK, np.cumsum(~dropped) - 1)
    return AlignmentBatch(
        student_chunk_id=_scatter(student, renumbered, (len(chunk_ids), student_length)),
        teacher_chunk_id=_scatter(teacher, renumbered, (len(chunk_ids), teacher_length)),
        chunk_count=int(np.count_nonzero(~dropped)),
    )


class _Labels(NamedTuple):
    """Every token of one side that is in a chunk."""

    chunk: NDArray[np.int64]
    row: NDArray[np.int64]
    position: NDArray[np.int64]
    is_label: NDArray[np.bool_]


def _flatten(rows: Sequence[ChunkIds], offsets: NDArray[np.int64], length: int) -> _Labels:
    sizes = np.array([len(ids) for ids in rows], dtype=np.int64)
    row = np.repeat(np.arange(len(rows), dtype=np.int64), sizes)
    token = np.arange(sizes.sum(), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chunk = np.concatenate([np.empty(0, dtype=np.int64), *rows])
    inside = chunk != NO_CHUNK
    row, position = row[inside], token[inside] - 1
    return _Labels(
        chunk=chunk[inside] + offsets[row],
        row=row,
        position=position,
        is_label=(position >= 0) & (position < length),
    )


def _flatten_masks(
    masks: Sequence[NDArray[np.bool_]], chunk_ids: Sequence[tuple[ChunkIds, ChunkIds]], length: int
) -> NDArray[np.bool_]:
    if len(masks) != len(chunk_ids):
        raise AlignmentError(
            "samples and student masks differ in number", got=len(masks), expected=len(chunk_ids)
        )
    trained = np.zeros((len(masks), length), dtype=np.bool_)
    for row, (mask, (student_ids, _)) in enumerate(zip(masks, chunk_ids, strict=True)):
        needed = min(len(student_ids) - 1, length)
        if len(mask) < needed:
            raise AlignmentError(
                f"the student mask of sample {row} is too short",
                got=f"{len(mask)} positions",
                expected=f"at least {needed}, one for each label",
                fix="shift the mask with the labels: position t is trained on token t + 1",
            )
        trained[row, : min(len(mask), length)] = mask[:length]
    return trained


def _scatter(side: _Labels, renumbered: NDArray[np.int64], shape: tuple[int, int]) -> torch.Tensor:
    padded = np.full(shape, NO_CHUNK, dtype=np.int64)
    labelled = side.is_label
    padded[side.row[labelled], side.position[labelled]] = renumbered[side.chunk[labelled]]
    return torch.from_numpy(padded)

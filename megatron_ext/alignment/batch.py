"""Tensors of the alignments of one microbatch. B samples, T tokens, C chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import Alignment
from megatron_ext.alignment.chunk_places import (
    BEGINS,
    BEGINS_UNEQUAL,
    ChunkIds,
    ChunkPlaces,
    LabelledSide,
    Marks,
    Stretches,
    first_ids_of,
    ids_of_marks,
    missing_chunk,
    untrained_positions,
)
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError

Pair = Alignment | tuple[ChunkIds, ChunkIds]
"""Alignment of one sample: an ``Alignment``, or its student [Ts] and teacher [Tt] chunk ids
in token coordinates, all of whose chunks are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentBatch:
    """Chunk ids in label coordinates: position ``t`` holds the chunk of the token it predicts.

    Ids run from 0 over the whole microbatch (not per sample), so that one segment sum serves all of
    it, and ``chunk_count`` is known on the host, so that no kernel waits for it.

    In the padded layout each sample is a row of [B, T]. In the packed layout all samples are in one
    row [1, T], each from ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``; its last position predicts
    nothing, and no chunk goes over a boundary.
    """

    student_chunk_id: torch.Tensor
    """[B, Ts] int64: chunk of ``labels[b, t]``, ``NO_CHUNK`` where that token is in none."""

    teacher_chunk_id: torch.Tensor
    """[B, Tt] int64"""

    chunk_count: int
    """C: every id in ``[0, C)`` occurs at least once on both sides."""

    is_exact: torch.Tensor
    """[C] bool: equal bytes on both sides."""

    chunk_class: torch.Tensor
    """[C] int8, see ``ChunkClass``."""

    student_spans: torch.Tensor
    """[C, 2] int64: first position of each chunk and one past its last, ``row * Ts + t``. A
    position in between can be in no chunk."""

    teacher_spans: torch.Tensor
    """[C, 2] int64"""

    student_is_chunk_start: torch.Tensor
    """[B, Ts] bool: first positions of chunks."""

    teacher_is_chunk_start: torch.Tensor
    """[B, Tt] bool"""

    sample: torch.Tensor
    """[C] int64: sample of each chunk, ascending."""

    student_order: torch.Tensor
    """[B Ts] int32: positions sorted by chunk, those of no chunk last."""

    student_offsets: torch.Tensor
    """[C + 1] int32: chunk c has the positions ``order[offsets[c]:offsets[c + 1]]``."""

    teacher_order: torch.Tensor
    """[B Tt] int32"""

    teacher_offsets: torch.Tensor
    """[C + 1] int32"""

    student_cu_seqlens: torch.Tensor | None = None
    """[B + 1] int32 where each packed sample starts, and the end; None in the padded layout."""

    teacher_cu_seqlens: torch.Tensor | None = None
    """[B + 1] int32"""

    student_behind: torch.Tensor | None = None
    """[C] int64: row behind each chunk, -1 where there is none, of rows that are not all those of
    their texts, one behind another; None: of the same row of labels, where it has one."""

    teacher_behind: torch.Tensor | None = None
    """[C] int64"""

    @classmethod
    def from_chunk_ids(
        cls,
        student_chunk_id: torch.Tensor,
        teacher_chunk_id: torch.Tensor,
        *,
        is_exact: torch.Tensor | None = None,
        student_cu_seqlens: torch.Tensor | None = None,
        teacher_cu_seqlens: torch.Tensor | None = None,
    ) -> AlignmentBatch:
        """The batch with these chunk ids, which are on the CPU; all chunks are exact by default.

        Raises:
            AlignmentError: A chunk that one side lacks, or a number below C that no chunk has.
        """
        student = ChunkPlaces.of_ids(student_chunk_id.numpy().reshape(-1), side="student")
        teacher = ChunkPlaces.of_ids(teacher_chunk_id.numpy().reshape(-1), side="teacher")
        return cls._of_places(
            (student_chunk_id, teacher_chunk_id),
            (student, teacher),
            (
                _starts(student.first, student_chunk_id.shape),
                _starts(teacher.first, teacher_chunk_id.shape),
            ),
            is_exact=is_exact,
            cu_seqlens=(student_cu_seqlens, teacher_cu_seqlens),
        )

    @classmethod
    def from_marks(cls, student_marks: Marks, teacher_marks: Marks) -> AlignmentBatch:
        """The padded batch with chunk marks [B, Ts] and [B, Tt].

        Raises:
            AlignmentError: Sides with different numbers of chunks, or marks that continue a chunk
                before any begins.
        """
        places = (
            ChunkPlaces.of_marks(student_marks.reshape(-1), side="student"),
            ChunkPlaces.of_marks(teacher_marks.reshape(-1), side="teacher"),
        )
        return cls._of_places(
            (
                torch.from_numpy(ids_of_marks(student_marks, np.int64)),
                torch.from_numpy(ids_of_marks(teacher_marks, np.int64)),
            ),
            places,
            (
                torch.from_numpy(student_marks >= BEGINS),
                torch.from_numpy(teacher_marks >= BEGINS),
            ),
            is_exact=torch.from_numpy(student_marks.reshape(-1)[places[0].first] == BEGINS),
        )

    def marks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunk marks [B, Ts] and [B, Tt] uint8, from which ``from_marks`` makes the batch again.

        A mark means the same in any row: unlike chunk ids, marks can be cut and joined by rows.

        Raises:
            AlignmentError: The layout is packed.
        """
        if self.student_cu_seqlens is not None:
            raise AlignmentError("a packed alignment has no marks by rows", fix="pad it")
        begins = torch.where(self.is_exact, BEGINS, BEGINS_UNEQUAL).to(torch.uint8)
        sides = []
        for chunk_id, spans in (
            (self.student_chunk_id, self.student_spans),
            (self.teacher_chunk_id, self.teacher_spans),
        ):
            marks = (chunk_id != NO_CHUNK).to(torch.uint8)
            marks.view(-1)[spans[:, 0]] = begins
            sides.append(marks)
        return sides[0], sides[1]

    @classmethod
    def _of_places(
        cls,
        chunk_ids: tuple[torch.Tensor, torch.Tensor],
        places: tuple[ChunkPlaces, ChunkPlaces],
        is_chunk_start: tuple[torch.Tensor, torch.Tensor],
        *,
        is_exact: torch.Tensor | None = None,
        cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> AlignmentBatch:
        student, teacher = places
        if len(student) != len(teacher):
            lacking = "student" if len(student) < len(teacher) else "teacher"
            raise missing_chunk(min(len(student), len(teacher)), side=lacking)
        if cu_seqlens[0] is None:
            sample = student.first // max(chunk_ids[0].shape[-1], 1)
        else:
            bounds = cu_seqlens[0].numpy()
            sample = np.searchsorted(bounds, student.first, side="right") - 1
        classes = 2 * student.is_many.view(np.int8) + teacher.is_many.view(np.int8)
        by_chunk = [_by_chunk(ids.numpy().reshape(-1), len(student)) for ids in chunk_ids]
        return cls(
            student_chunk_id=chunk_ids[0],
            teacher_chunk_id=chunk_ids[1],
            chunk_count=len(student),
            is_exact=torch.ones(len(student), dtype=torch.bool, device="cpu")
            if is_exact is None
            else is_exact,
            chunk_class=torch.from_numpy(classes),
            student_spans=torch.from_numpy(student.spans),
            teacher_spans=torch.from_numpy(teacher.spans),
            student_is_chunk_start=is_chunk_start[0],
            teacher_is_chunk_start=is_chunk_start[1],
            sample=torch.from_numpy(sample.astype(np.int64, copy=False)),
            student_order=by_chunk[0][0],
            student_offsets=by_chunk[0][1],
            teacher_order=by_chunk[1][0],
            teacher_offsets=by_chunk[1][1],
            student_cu_seqlens=cu_seqlens[0],
            teacher_cu_seqlens=cu_seqlens[1],
        )

    def to(self, device: torch.device | str) -> AlignmentBatch:
        """The same batch on ``device``."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> AlignmentBatch:
        """The same batch in page-locked memory, from which ``to`` copies asynchronously."""
        return self._each(torch.Tensor.pin_memory)

    def __len__(self) -> int:
        """B."""
        if self.student_cu_seqlens is not None:
            return len(self.student_cu_seqlens) - 1
        return len(self.student_chunk_id)

    def __getitem__(self, index: int) -> AlignmentBatch:
        """One sample [1, T] in the padded layout, with ids from 0; synchronises with the device."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a batch of {len(self)}")
        index %= len(self)
        first = int((self.sample < index).sum())
        is_exact = self.is_exact[self.sample == index]
        return AlignmentBatch.from_chunk_ids(
            _sample_ids(self.student_chunk_id, self.student_cu_seqlens, index, first),
            _sample_ids(self.teacher_chunk_id, self.teacher_cu_seqlens, index, first),
            is_exact=is_exact.cpu(),
        ).to(self.student_chunk_id.device)

    def __iter__(self) -> Iterator[AlignmentBatch]:
        return (self[index] for index in range(len(self)))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> AlignmentBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {
            n: change(value) for n, value in values.items() if torch.is_tensor(value)
        }
        return replace(self, **tensors)


def pad_alignments(
    alignments: Sequence[Pair],
    *,
    student_length: int,
    teacher_length: int,
    student_masks: Sequence[NDArray[np.bool_]] | None = None,
) -> AlignmentBatch:
    """Batch of per-sample alignments in token coordinates, one sample a row.

    Position ``t`` of the result holds the chunk of token ``t + 1``. Token 0 is never predicted and
    a token past the padded length is never seen, so a chunk that holds one of them on either side
    is dropped on both; the others are renumbered without gaps, samples one after the other.

    Args:
        alignments: B alignments, or pairs of chunk ids as an ``Alignment`` has them.
        student_length: Label positions of a padded student row.
        teacher_length: Label positions of a padded teacher row.
        student_masks: B rows of bool, True where the label position is trained; at least as many as
            the sample has label positions. A chunk with an untrained student position is dropped.

    Returns:
        ids [B, student_length] and [B, teacher_length], on the CPU.

    Raises:
        AlignmentError: A length below 1, a sample without its mask, or a mask that is too short.
    """
    for side, length in (("student", student_length), ("teacher", teacher_length)):
        if length < 1:
            raise AlignmentError(
                f"{side}_length holds no token", got=length, expected="at least 1 token"
            )
    count = len(alignments)
    return _batch(
        alignments,
        (Stretches.padded(count, student_length), Stretches.padded(count, teacher_length)),
        ((count, student_length), (count, teacher_length)),
        student_masks,
    )


def pack_alignments(
    alignments: Sequence[Pair],
    *,
    student_masks: Sequence[NDArray[np.bool_]] | None = None,
    multiple_of: int = 1,
) -> AlignmentBatch:
    """Batch of per-sample alignments in token coordinates, all samples in one row.

    A sample takes as many positions as it has tokens, on each side; its last position predicts
    nothing, and its first token is not predicted, so that chunks with it are dropped.

    Args:
        alignments: B alignments, or pairs of chunk ids as an ``Alignment`` has them.
        student_masks: As ``pad_alignments`` takes them.
        multiple_of: Each sample's positions are filled up to a multiple of this, as context
            parallelism needs it.

    Returns:
        ids [1, sum of Ts] and [1, sum of Tt], on the CPU, with ``cu_seqlens`` of both sides.

    Raises:
        AlignmentError: A multiple below 1, a sample without its mask, or a mask that is too short.
    """
    if multiple_of < 1:
        raise AlignmentError("multiple_of is not a length", got=multiple_of, expected="at least 1")
    student, teacher = (
        Stretches.packed([-(-len(ids) // multiple_of) * multiple_of for ids in side])
        for side in _sides(alignments)
    )
    shapes = ((1, student.total), (1, teacher.total))
    return _batch(alignments, (student, teacher), shapes, student_masks, is_packed=True)


def _batch(
    alignments: Sequence[Pair],
    stretches: tuple[Stretches, Stretches],
    shapes: tuple[tuple[int, int], tuple[int, int]],
    student_masks: Sequence[NDArray[np.bool_]] | None,
    *,
    is_packed: bool = False,
) -> AlignmentBatch:
    student_rows, teacher_rows = _sides(alignments)
    first_ids = first_ids_of(list(zip(student_rows, teacher_rows, strict=True)))
    student = LabelledSide(student_rows, stretches[0], first_ids)
    teacher = LabelledSide(teacher_rows, stretches[1], first_ids)
    dropped = student.unseen | teacher.unseen
    if student_masks is not None:
        untrained = untrained_positions(student_masks, student_rows, stretches[0])
        dropped |= student.touching(untrained)
    renumbered = np.where(dropped, NO_CHUNK, np.cumsum(~dropped) - 1)
    cu_seqlens = [_cu_seqlens(side) if is_packed else None for side in stretches]
    return AlignmentBatch.from_chunk_ids(
        torch.from_numpy(student.label_ids(renumbered).reshape(shapes[0])),
        torch.from_numpy(teacher.label_ids(renumbered).reshape(shapes[1])),
        is_exact=torch.from_numpy(_is_exact(alignments, first_ids)[~dropped]),
        student_cu_seqlens=cu_seqlens[0],
        teacher_cu_seqlens=cu_seqlens[1],
    )


def _sides(alignments: Sequence[Pair]) -> tuple[list[ChunkIds], list[ChunkIds]]:
    pairs = [
        (pair.student_chunk_id, pair.teacher_chunk_id) if isinstance(pair, Alignment) else pair
        for pair in alignments
    ]
    return [student for student, _ in pairs], [teacher for _, teacher in pairs]


def _is_exact(alignments: Sequence[Pair], first_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    is_exact = np.ones(int(first_ids[-1]), dtype=np.bool_)
    for pair, first in zip(alignments, first_ids.tolist(), strict=False):
        if isinstance(pair, Alignment):
            is_exact[first : first + pair.chunk_count] = pair.is_exact
    return is_exact


def _cu_seqlens(stretches: Stretches) -> torch.Tensor:
    bounds = np.append(stretches.starts, stretches.total)
    return torch.from_numpy(bounds.astype(np.int32))


def _starts(first: NDArray[np.int64], shape: torch.Size) -> torch.Tensor:
    starts = np.zeros(int(np.prod(shape)), dtype=np.bool_)
    starts[first] = True
    return torch.from_numpy(starts.reshape(tuple(shape)))


def _by_chunk(chunk_id: NDArray[np.int64], chunk_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions sorted by chunk int32 [T], those of no chunk last, and where each chunk begins.

    On the host, where data is loaded: a GPU needs some ten launches for it.
    """
    slots = np.where(chunk_id < 0, chunk_count, chunk_id)
    order = np.argsort(slots, kind="stable").astype(np.int32)
    sizes = np.bincount(slots, minlength=chunk_count + 1)[:chunk_count]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return torch.from_numpy(order), torch.from_numpy(offsets)


def _sample_ids(
    chunk_id: torch.Tensor, cu_seqlens: torch.Tensor | None, index: int, first: int
) -> torch.Tensor:
    """Chunk ids [1, T] of one sample, counted from ``first``, on the CPU."""
    if cu_seqlens is None:
        ids = chunk_id[index : index + 1].cpu()
    else:
        start, stop = cu_seqlens[index : index + 2].tolist()
        ids = chunk_id[:, start:stop].cpu()
    return torch.where(ids == NO_CHUNK, ids, ids - first)

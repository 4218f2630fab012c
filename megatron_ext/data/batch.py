"""Tensors of one microbatch for the student and every teacher, and the layout of rows.

B rows, T label positions, S segments, L labels of all segments, G segments and paddings of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.alignment.chunk_places import BEGINS, OUTSIDE, Marks
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.data.aligner import AlignedText
from megatron_ext.data.side import Parts, Segment, Side
from megatron_ext.errors import DataError


@dataclass(frozen=True, slots=True)
class SideBatch:
    """The tensors of one model. A segment is a text, or a piece of one, in a row."""

    input_ids: torch.Tensor
    """[B, T] int64"""

    labels: torch.Tensor
    """[B, T] int64 target of each position, ``IGNORE_INDEX`` where there is none. Nothing is
    predicted across the end of a segment."""

    loss_mask: torch.Tensor
    """[B, T] float32, 1 where a label is trained."""

    position_ids: torch.Tensor
    """[B, T] int64, from 0 in each segment and in the padding of each row."""

    lengths: torch.Tensor
    """[B] int64 positions of each row before its padding."""

    cu_seqlens: torch.Tensor
    """[G + 1] int32 bounds of the segments of the concatenated rows; the padding of a row counts as
    a segment."""

    max_seqlen: int
    """Positions of the longest segment (host integer)."""

    byte_count: int
    """Bytes of the texts (host integer)."""

    def to(self, device: torch.device | str) -> SideBatch:
        """A copy on ``device``."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SideBatch:
        """A copy in page-locked memory."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SideBatch:
        values = _fields(self)
        tensors = {n: change(value) for n, value in values.items() if torch.is_tensor(value)}
        return SideBatch(**values | tensors)


@dataclass(frozen=True, slots=True)
class CrossTokenizerBatch:
    """One microbatch: the same texts for the student and every teacher, with alignments."""

    student: SideBatch

    teachers: Mapping[str, SideBatch]
    """By teacher name. A teacher with the student's tokenizer shares the student's tensors."""

    alignments: Mapping[str, AlignmentBatch]
    """By teacher name; chunk ids are in label coordinates."""

    token_count: int
    """Trained student labels (host integer)."""

    dropped_bytes: int
    """Bytes of the texts that did not fit a row (host integer)."""

    sampled_log_probs: torch.Tensor | None = None
    """[B, T] float32 log-probability with which each of the student's labels was sampled, NaN where
    none was; None in a batch without samples."""

    sources: tuple[int, ...] = ()
    """[B] number of each row's source in a run."""

    def to(self, device: torch.device | str) -> CrossTokenizerBatch:
        """A copy on ``device``; tensors that teachers share stay shared."""
        return self._each(lambda part: part.to(device))

    def pin_memory(self) -> CrossTokenizerBatch:
        """A copy in page-locked memory; called by ``DataLoader(pin_memory=True)``."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> CrossTokenizerBatch:
        student = change(self.student)
        return replace(
            self,
            student=student,
            teachers={
                name: student if side is self.student else change(side)
                for name, side in self.teachers.items()
            },
            alignments={name: change(batch) for name, batch in self.alignments.items()},
            sampled_log_probs=None
            if self.sampled_log_probs is None
            else change(self.sampled_log_probs),
        )

    def __contains__(self, name: object) -> NoReturn:
        """Refuse what a trainer of transformers asks of each batch, which has to be a mapping."""
        raise DataError(
            "a batch across tokenizers is not a mapping",
            got=f"{name!r} in CrossTokenizerBatch",
            fix="give trainers data_collator=collator.tensors, or batch.tensors()",
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """A flat mapping of tensors alone, from which ``of_tensors`` makes the batch again.

        Every tensor has a row for each of the B rows, so what moves, cuts by rows or gathers
        mappings of tensors (accelerate, ``transformers.Trainer``, Lightning) can do so. Numbers of
        the whole batch are in the first row. The student's targets are ``shift_labels``, shifted
        already: position ``t`` holds what position ``t`` predicts.
        """
        labels = self.student.labels
        whole = labels.new_zeros(2, len(labels))
        whole[:, :1] = labels.new_tensor([[self.student.byte_count], [self.dropped_bytes]])
        named = _side_tensors(self.student) | {"byte_count": whole[0], "dropped_bytes": whole[1]}
        if self.sources:
            named["sources"] = labels.new_tensor(self.sources)
        if self.sampled_log_probs is not None:
            named["sampled_log_probs"] = self.sampled_log_probs
        for name, side in self.teachers.items():
            student_marks, teacher_marks = self.alignments[name].marks()
            named[f"{_ALIGNMENTS}{name}.student"] = student_marks
            if side is self.student:
                continue
            named[f"{_ALIGNMENTS}{name}.teacher"] = teacher_marks
            named |= _side_tensors(side, f"{_TEACHERS}{name}.")
        return named

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> CrossTokenizerBatch:
        """The batch that ``tensors`` was made of, or the one of the rows that are left of it.

        On the tensors' device; bounds and chunks are found on the host, which waits for them.

        Raises:
            DataError: The mapping is not one that ``tensors`` made.
        """
        whole = [int(_tensor(tensors, name).sum()) for name in ("byte_count", "dropped_bytes")]
        student = _side_of(tensors, "", byte_count=whole[0])
        device = student.labels.device
        teachers, alignments = {}, {}
        for key in tensors:
            if not (key.startswith(_ALIGNMENTS) and key.endswith(".student")):
                continue
            name = key[len(_ALIGNMENTS) : -len(".student")]
            is_shared = f"{_ALIGNMENTS}{name}.teacher" not in tensors
            teachers[name] = (
                student
                if is_shared
                else _side_of(tensors, f"{_TEACHERS}{name}.", byte_count=whole[0])
            )
            others = key if is_shared else f"{_ALIGNMENTS}{name}.teacher"
            marks = (tensors[side].cpu().numpy() for side in (key, others))
            alignments[name] = AlignmentBatch.from_marks(*marks).to(device)
        sources = tensors.get("sources")
        return cls(
            student=student,
            teachers=teachers,
            alignments=alignments,
            token_count=int(student.loss_mask.sum()),
            dropped_bytes=whole[1],
            sampled_log_probs=tensors.get("sampled_log_probs"),
            sources=() if sources is None else tuple(sources.tolist()),
        )

    def as_dict(self) -> dict[str, Any]:
        """A flat mapping: the student's fields by name, and ``teacher_{i}_...`` and
        ``alignment_{i}_...`` for teacher ``i`` in the configured order."""
        named: dict[str, Any] = _fields(self.student)
        for index, name in enumerate(self.teachers):
            named |= _fields(self.teachers[name], f"teacher_{index}_")
            named |= _fields(self.alignments[name], f"alignment_{index}_")
        return named | {"token_count": self.token_count, "dropped_bytes": self.dropped_bytes}


def _fields(record: SideBatch | AlignmentBatch, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{field.name}": getattr(record, field.name) for field in fields(record)}


_TEACHERS: Final = "teachers."
_ALIGNMENTS: Final = "alignments."
"""Prefixes of keys of ``CrossTokenizerBatch.tensors``; a teacher's name and a field follow."""

_SIDE_KEYS: Final = {
    "input_ids": "input_ids",
    "labels": "shift_labels",
    "position_ids": "position_ids",
    "lengths": "lengths",
}
"""Field of a ``SideBatch`` -> its key; the other fields follow from these. HuggingFace's models
would shift what is called ``labels`` once more."""


def _side_tensors(side: SideBatch, prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": getattr(side, name) for name, key in _SIDE_KEYS.items()}


def _side_of(tensors: Mapping[str, torch.Tensor], prefix: str, *, byte_count: int) -> SideBatch:
    """The side whose ``_side_tensors`` are under ``prefix``."""
    ids, labels, position_ids, lengths = (
        _tensor(tensors, f"{prefix}{key}") for key in _SIDE_KEYS.values()
    )
    rows, length = labels.shape
    row_starts = np.arange(rows + 1) * length
    ends = row_starts[:-1] + lengths.cpu().numpy()
    is_text = np.arange(length) < lengths.cpu().numpy()[:, None]
    begins = np.flatnonzero((position_ids.cpu().numpy() == 0) & is_text)
    bounds = np.unique(np.concatenate([row_starts, ends, begins]))
    return SideBatch(
        input_ids=ids,
        labels=labels,
        loss_mask=(labels != IGNORE_INDEX).float(),
        position_ids=position_ids,
        lengths=lengths,
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)).to(labels.device),
        max_seqlen=int(np.diff(bounds).max(initial=0)),
        byte_count=byte_count,
    )


def _tensor(tensors: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    if key not in tensors:
        raise DataError(
            "the mapping is not a batch of CrossTokenizerCollator.tensors",
            got=f"keys {', '.join(map(str, tensors)) or 'none'}",
            expected=f"a tensor under {key!r}",
            fix="give data_collator=collator.tensors, and keep all columns"
            " (remove_unused_columns=False)",
        )
    return tensors[key]


Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Places of segments in B rows; rows are seen as concatenated."""

    segments: list[Segment]
    """S"""

    row_count: int
    """B"""

    row_length: int
    """T"""

    label_counts: Counts
    """[S]"""

    lengths: Counts
    """[S] positions of each segment, of which labels may be fewer."""

    row_of: Counts
    """[S]"""

    @classmethod
    def of(cls, rows: Sequence[Sequence[Segment]], side: Side) -> Layout:
        """The layout of B rows of segments."""
        segments = list(chain.from_iterable(rows))
        labels = np.array([segment.label_count for segment in segments], np.int64)
        lengths = -(-labels // side.segment_multiple) * side.segment_multiple
        row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        longest = int(np.bincount(row_of, lengths, len(rows)).max(initial=0))
        assert longest <= side.length, f"a row of {side.name} overflows"
        return cls(segments, len(rows), side.row_length(longest), labels, lengths, row_of)

    @cached_property
    def filled(self) -> Counts:
        """[B] positions of each row before the padding."""
        return np.bincount(self.row_of, self.lengths, self.row_count).astype(np.int64)

    @cached_property
    def starts(self) -> Counts:
        """[S] first position of each segment in the concatenated rows."""
        rows_before = np.cumsum(self.filled) - self.filled
        before = np.cumsum(self.lengths) - self.lengths
        return before + (np.arange(self.row_count) * self.row_length - rows_before)[self.row_of]

    @cached_property
    def bounds(self) -> Counts:
        """[G + 1] bounds of the segments; the padding of a row counts as one."""
        row_starts = np.arange(self.row_count + 1) * self.row_length
        ends = row_starts[:-1] + self.filled
        begins = self.starts[self.lengths > 0]
        bounds: Counts = np.unique(np.concatenate([row_starts, ends, begins]))
        return bounds

    def laid_out(
        self, parts: Iterable[Parts], fill: float, kind: type[np.generic] = np.int64
    ) -> NDArray[Any]:
        """Scatter values of the labels to their positions [B, T], with ``fill`` elsewhere.

        Args:
            parts: S tuples of arrays whose concatenation has one value for each label of a segment.
            fill: Value of positions without a label.
            kind: dtype of the result.
        """
        fills = np.full(max(self._gaps), fill, kind)
        placed = [fills[: self._gaps[0]]]
        for values, gap in zip(parts, self._gaps[1:], strict=True):
            placed.extend(values)
            if gap:
                placed.append(fills[:gap])
        rows: NDArray[Any] = np.concatenate(placed, dtype=kind)
        return rows.reshape(self.row_count, self.row_length)

    @cached_property
    def _gaps(self) -> list[int]:
        """[S + 1] unlabelled positions before the first segment and behind the labels of each."""
        stops = np.append(self.starts, self.row_count * self.row_length)
        gaps: list[int] = (stops - np.append(0, self.starts + self.label_counts)).tolist()
        return gaps


def side_batch(
    layout: Layout, *, pad: int, byte_count: int, position_count: int | None = None
) -> SideBatch:
    """The tensors of one model for a layout.

    Args:
        layout: B rows of segments.
        pad: Id of the padding.
        byte_count: Bytes of the texts.
        position_count: Number of position embeddings; padding beyond repeats the last position.
            None: no row is longer.
    """
    segments = layout.segments
    labels = layout.laid_out((segment.labels() for segment in segments), IGNORE_INDEX)
    bounds = layout.bounds
    sizes = np.diff(bounds)
    counted = np.arange(sizes.max(initial=0))
    if position_count is not None:
        counted = np.minimum(counted, position_count - 1)
    positions = [counted[:size] for size in sizes.tolist()]
    return SideBatch(
        input_ids=torch.from_numpy(
            layout.laid_out((segment.inputs() for segment in segments), pad)
        ),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy((labels != IGNORE_INDEX).astype(np.float32)),
        position_ids=torch.from_numpy(np.concatenate([counted[:0], *positions])).view(labels.shape),
        lengths=torch.from_numpy(layout.filled),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=int(sizes.max(initial=0)),
        byte_count=byte_count,
    )


def sampled_log_probs(pieces: Sequence[AlignedText], layout: Layout) -> torch.Tensor | None:
    """[B, T] ``CrossTokenizerBatch.sampled_log_probs`` of the student's layout.

    Args:
        pieces: All segments, row after row.
    """
    if all(piece.log_probs is None for piece in pieces):
        return None
    end = np.full(1, np.nan, np.float32)
    parts = (
        segment.at_labels(
            np.full(len(segment.ids), np.nan, np.float32)
            if piece.log_probs is None
            else piece.log_probs,
            end,
        )
        for piece, segment in zip(pieces, layout.segments, strict=True)
    )
    return torch.from_numpy(layout.laid_out(parts, np.nan, np.float32))


_PAIRED_END: Final = np.array([BEGINS], np.uint8)
_LONE_END: Final = np.array([OUTSIDE], np.uint8)


def alignment_batch(
    pieces: Iterable[AlignedText], teacher_index: int, student: Layout, teacher: Layout
) -> AlignmentBatch:
    """The alignment of the student's rows with a teacher's.

    The end-of-document tokens of both sides form a chunk. Where a side has no leading token and so
    does not predict its first token, the chunk of that token is dropped on both sides.

    Args:
        pieces: All segments, row after row.
        teacher_index: Index among the teachers with another tokenizer than the student.
        student: The student's layout.
        teacher: The teacher's.
    """
    parts = list(_parts(pieces, teacher_index, student, teacher))
    return AlignmentBatch.from_marks(
        student.laid_out((own for own, _ in parts), OUTSIDE, np.uint8),
        teacher.laid_out((its for _, its in parts), OUTSIDE, np.uint8),
    )


def identity_batch(labels: torch.Tensor) -> AlignmentBatch:
    """The alignment with a teacher of the same tokenizer: each label [B, T] is its own chunk."""
    is_label = (labels != IGNORE_INDEX).flatten()
    counted = is_label.cumsum(0)
    chunk_id = torch.where(is_label, counted - 1, NO_CHUNK).view(labels.shape)
    return AlignmentBatch.from_chunk_ids(chunk_id, chunk_id)


def _parts(
    pieces: Iterable[AlignedText], teacher_index: int, student: Layout, teacher: Layout
) -> Iterator[tuple[Parts, Parts]]:
    """Chunk marks of each segment's labels, for the student and the teacher."""
    for piece, own, its in zip(pieces, student.segments, teacher.segments, strict=True):
        tokens = piece.teachers[teacher_index]
        own_marks, its_marks = tokens.student_marks, tokens.teacher_marks
        if own.reads_first(own_marks) or its.reads_first(its_marks):
            own_marks, its_marks = _without_first(own_marks), _without_first(its_marks)
        end = _LONE_END if own.eod is None or its.eod is None else _PAIRED_END
        yield own.at_labels(own_marks, end), its.at_labels(its_marks, end)


def _without_first(marks: Marks) -> Marks:
    """Marks [T] with the first chunk removed."""
    second = np.flatnonzero(marks >= BEGINS)[1:2].tolist()
    kept: Marks = marks.copy()
    kept[: second[0] if second else len(marks)] = OUTSIDE
    return kept

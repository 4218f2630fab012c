"""A microbatch as models and losses read it, alone and with targets. B rows, T positions.

Over context-parallel ranks a model reads this rank's part of every row, S positions of T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeVar

import torch

from megatron_ext.alignment.alignment import ChunkCounts
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK, ON_HOST
from megatron_ext.data.batch import CrossTokenizerBatch, SideBatch
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.losses import Completions, KnownAhead, TeacherTargets
from megatron_ext.losses.context_parallel import ContextParallelPlan
from megatron_ext.losses.microbatch_tiles import MicrobatchTiles
from megatron_ext.teachers.base import TokenRows

Record = TypeVar("Record")
_ALIGNMENT: Final = 16
"""Bytes; every dtype begins at a multiple of its size."""


def uploaded(record: Record, device: torch.device) -> Record:
    """A record with its tensors on ``device``, views of one copy from page-locked memory.

    Dataclasses, mappings and tuples are looked into, but for fields marked ``ON_HOST``. What is
    shared within the record stays shared. A CPU takes the tensors as they are.
    """
    if device.type == "cpu":
        return record
    tensors: dict[int, torch.Tensor] = {}
    _rebuilt(record, lambda tensor: tensors.setdefault(id(tensor), tensor), {})
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    starts = list(accumulate(sizes, initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=True)

    def views(memory: torch.Tensor) -> dict[int, torch.Tensor]:
        return {
            key: memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (key, tensor), start in zip(tensors.items(), starts, strict=False)
        }

    for key, view in views(buffer).items():
        view.copy_(tensors[key])
    moved = views(buffer.to(device, non_blocking=True))
    rebuilt: Record = _rebuilt(record, lambda tensor: moved[id(tensor)], {})
    return rebuilt


def _rebuilt(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], known: dict[int, Any]
) -> Any:
    """``value`` with its tensors changed; ``known`` has what was rebuilt, by identity."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, torch.Tensor):
        made: Any = change(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.metadata != ON_HOST}
        parts = {name: _rebuilt(part, change, known) for name, part in parts.items()}
        made = replace(value, **parts)
    elif isinstance(value, Mapping):
        made = {key: _rebuilt(part, change, known) for key, part in value.items()}
    elif isinstance(value, tuple) and any(not isinstance(part, int) for part in value):
        parts_of = [_rebuilt(part, change, known) for part in value]
        made = type(value)(*parts_of) if hasattr(value, "_fields") else tuple(parts_of)
    else:
        return value
    known[id(value)] = made
    return made


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Inputs of one model on one rank; S is T where rows are whole."""

    tokens: torch.Tensor
    """[B, S] int64"""

    labels: torch.Tensor
    """[B, S] int64: the next token, ``IGNORE_INDEX`` where none is predicted."""

    position_ids: torch.Tensor
    """[B, S] int64, from 0 in each text."""

    byte_count: int
    """Bytes of the texts of whole rows; on the host."""

    rows: TokenRows | None = field(default=None, metadata=ON_HOST)
    """The whole rows; they stay on the host."""

    attention_mask: torch.Tensor | None = None
    """[B, 1, S, T] bool: True where a position may not attend; None for a plain causal mask. Made
    where the models are, by ``Microbatch.to``."""

    @classmethod
    def of(cls, side: SideBatch, context: ContextRank | None = None) -> TokenBatch:
        """The inputs of one model from its side of a batch, on its device.

        Args:
            context: The rank whose part is taken; None for whole rows.
        """
        whole = TokenRows(
            tokens=side.input_ids,
            position_ids=side.position_ids,
            labels=side.labels,
            # A row of one text with padding behind it needs no mask but the causal one.
            cu_seqlens=side.cu_seqlens if _has_several(side) else None,
        )
        tokens, labels, position_ids = side.input_ids, side.labels, side.position_ids
        if context is not None:
            tokens, labels, position_ids = map(context.cut, (tokens, labels, position_ids))
        return cls(tokens, labels, position_ids, side.byte_count, whole)

    def with_mask(self, cu_seqlens: torch.Tensor, context: ContextRank | None) -> TokenBatch:
        """The same inputs with their mask, on the device of ``cu_seqlens`` [G + 1]."""
        if self.rows is None or self.rows.cu_seqlens is None:
            return self
        rows = replace(self.rows, cu_seqlens=cu_seqlens)
        return replace(self, attention_mask=rows.attention_mask(cu_seqlens.device, context))


def _has_several(side: SideBatch) -> bool:
    """Whether any row holds several texts; computed on the host."""
    rows, length = side.input_ids.shape
    bounds = side.cu_seqlens.tolist()
    starts = {row * length for row in range(rows + 1)}
    ends = {row * length + int(filled) for row, filled in enumerate(side.lengths.tolist())}
    return any(bound not in starts | ends for bound in bounds)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch for the student and every teacher."""

    sides: CrossTokenizerBatch

    student: TokenBatch

    teachers: Mapping[str, TokenBatch]
    """By the names of the teachers."""

    chunk_counts: ChunkCounts
    """Numbers of chunks by size, and of labels in no chunk, over all teachers; on the host."""

    compared: Mapping[str, int] | None = None
    """Chunks or labels that the teachers' objectives sum over, by count name, counted on the host;
    None where that takes more than the data."""

    completions: Mapping[str, Completions] = field(default_factory=dict)
    """Completions by teacher whose objective has a table of them."""

    tiles: Mapping[str, MicrobatchTiles] = field(default_factory=dict)
    """Tiles of the linear form, by teacher."""

    context: ContextRank | None = None
    """The rank whose part of the rows the models read; None where rows are whole. ``sides`` holds
    whole rows in either case."""

    plans: Mapping[str, ContextParallelPlan] = field(default_factory=dict)
    """Chunks that this rank owns, by teacher whose objective sums over chunks; only where rows are
    cut."""

    sampled_count: int = 0
    """Trained student labels that the student itself has sampled; on the host."""

    logged_row: int | None = None
    """Row whose sampled text is logged, with the surprise of all models; None for no row."""

    recorded: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Cached targets of these rows by teacher, on the last stage: [B, S, ...] by the field of
    ``TeacherTargets``."""

    @classmethod
    def of(
        cls,
        sides: CrossTokenizerBatch,
        completions: Mapping[str, Completions],
        tiles: Mapping[str, MicrobatchTiles] | None = None,
        *,
        context: ContextRank | None = None,
        plans: Mapping[str, ContextParallelPlan] | None = None,
    ) -> Microbatch:
        """The microbatch of a collated batch, on the CPU."""
        student = TokenBatch.of(sides.student, context)
        return cls(
            sides=sides,
            student=student,
            teachers={
                name: student if side is sides.student else TokenBatch.of(side, context)
                for name, side in sides.teachers.items()
            },
            chunk_counts=sum((_counts(sides, name) for name in sides.teachers), ChunkCounts()),
            completions=completions,
            tiles=tiles or {},
            context=context,
            plans=plans or {},
            sampled_count=_sampled_count(sides),
        )

    @property
    def row_length(self) -> int:
        """T, the length of the student's whole rows."""
        return self.sides.student.input_ids.shape[1]

    @property
    def whole_labels(self) -> torch.Tensor:
        """[B, T] the student's labels, also where its rows are cut."""
        return self.student.labels if self.context is None else self.sides.student.labels

    def whole_labels_of(self, teacher: str) -> torch.Tensor:
        """[B, T] a teacher's labels, also where its rows are cut."""
        cut = self.context is not None
        return self.sides.teachers[teacher].labels if cut else self.teachers[teacher].labels

    @property
    def token_count(self) -> int:
        """Number of student labels that are trained; on the host."""
        return self.sides.token_count

    @property
    def sampled_log_probs(self) -> torch.Tensor | None:
        """[B, S] of this rank's part of the rows; see ``CrossTokenizerBatch``."""
        whole = self.sides.sampled_log_probs
        return whole if whole is None or self.context is None else self.context.cut(whole)

    @property
    def recorded_labels(self) -> torch.Tensor:
        """[B, S] the student's labels that nobody sampled, which cross-entropy may teach."""
        labels, sampled = self.student.labels, self.sampled_log_probs
        return labels if sampled is None else labels.masked_fill(~sampled.isnan(), IGNORE_INDEX)

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on ``device``, in one copy, with masks for packed rows."""
        moved = uploaded(self, device)
        sides, student = moved.sides, moved.student
        with_mask = student.with_mask(sides.student.cu_seqlens, self.context)
        return replace(
            moved,
            student=with_mask,
            teachers={
                name: with_mask
                if batch is student
                else batch.with_mask(sides.teachers[name].cu_seqlens, self.context)
                for name, batch in moved.teachers.items()
            },
        )


def _sampled_count(sides: CrossTokenizerBatch) -> int:
    """Trained labels that were sampled, on the CPU."""
    if sides.sampled_log_probs is None:
        return 0
    is_sampled = ~sides.sampled_log_probs.isnan()
    return int((is_sampled & (sides.student.labels != IGNORE_INDEX)).sum())


def _counts(sides: CrossTokenizerBatch, name: str) -> ChunkCounts:
    """Chunk counts of one teacher's alignment, on the CPU."""
    alignment = sides.alignments[name]
    student, teacher = (
        int(((side.labels != IGNORE_INDEX) & (chunk_id == NO_CHUNK)).sum())
        for side, chunk_id in (
            (sides.student, alignment.student_chunk_id),
            (sides.teachers[name], alignment.teacher_chunk_id),
        )
    )
    return ChunkCounts.of_classes(
        alignment.chunk_class.numpy(), student_unaligned=student, teacher_unaligned=teacher
    )


class MicrobatchWithTargets(NamedTuple):
    """A microbatch as the student's schedule reads it."""

    batch: Microbatch

    targets: Mapping[str, TeacherTargets]
    """By teacher, on the last stage; empty on the others."""

    known_ahead: Mapping[str, KnownAhead]
    """Labels and alignment that each teacher's objective counts, on every stage. Under
    ``select_teacher``, rows of another teacher are left out, on the last stage alone."""

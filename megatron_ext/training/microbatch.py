"""A microbatch as models and losses read it, alone and with targets. B rows, T positions.

Over context-parallel ranks a model reads this rank's part of every row, S positions of T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from megatron_ext.alignment.alignment import ChunkCounts
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.data.batch import CrossTokenizerBatch, SideBatch
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.losses import ChunkCompletions, KnownAhead, TeacherTargets
from megatron_ext.losses.context_parallel import ContextParallelPlan
from megatron_ext.losses.microbatch_tiles import MicrobatchTiles
from megatron_ext.teachers.base import TokenRows


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Inputs of one model on one rank; S is T where rows are whole."""

    tokens: torch.Tensor
    """[B, S] int64"""

    labels: torch.Tensor
    """[B, S] int64: the next token, ``IGNORE_INDEX`` where none is predicted."""

    position_ids: torch.Tensor
    """[B, S] int64, from 0 in each text."""

    attention_mask: torch.Tensor | None
    """[B, 1, S, T] bool: True where a position may not attend; None for a plain causal mask."""

    byte_count: int
    """Bytes of the texts of whole rows; on the host."""

    rows: TokenRows | None = None
    """The whole rows; they stay on the host."""

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
        mask = whole.attention_mask(context=context)
        return cls(tokens, labels, position_ids, mask, side.byte_count, whole)


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

    completions: Mapping[str, ChunkCompletions] = field(default_factory=dict)
    """Completions for ``partition_kl``, by teacher with a completion table."""

    tiles: Mapping[str, MicrobatchTiles] = field(default_factory=dict)
    """Tiles of the linear form, by teacher."""

    context: ContextRank | None = None
    """The rank whose part of the rows the models read; None where rows are whole. ``sides`` holds
    whole rows in either case."""

    plans: Mapping[str, ContextParallelPlan] = field(default_factory=dict)
    """Chunks that this rank owns, by teacher whose objective sums over chunks; only where rows are
    cut."""

    recorded: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Cached targets of these rows by teacher, on the last stage: [B, S, ...] by the field of
    ``TeacherTargets``."""

    @classmethod
    def of(
        cls,
        sides: CrossTokenizerBatch,
        completions: Mapping[str, ChunkCompletions],
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

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on ``device``."""
        sides = self.sides.to(device)
        student = _moved(self.student, sides.student, device)
        return replace(
            self,
            sides=sides,
            student=student,
            teachers={
                name: student
                if self.teachers[name] is self.student
                else _moved(self.teachers[name], side, device)
                for name, side in sides.teachers.items()
            },
            completions={name: c.to(device) for name, c in self.completions.items()},
            tiles={name: cut.to(device) for name, cut in self.tiles.items()},
            plans={name: plan.to(device) for name, plan in self.plans.items()},
            recorded={
                name: {key: value.to(device, non_blocking=True) for key, value in fields.items()}
                for name, fields in self.recorded.items()
            },
        )


def _moved(batch: TokenBatch, side: SideBatch, device: torch.device) -> TokenBatch:
    """``batch`` on ``device``; whole rows share the tensors of ``side``, which is there already."""
    if batch.tokens.shape == side.input_ids.shape:
        batch = replace(
            batch, tokens=side.input_ids, labels=side.labels, position_ids=side.position_ids
        )
    mask = batch.attention_mask
    return replace(
        batch,
        tokens=batch.tokens.to(device, non_blocking=True),
        labels=batch.labels.to(device, non_blocking=True),
        position_ids=batch.position_ids.to(device, non_blocking=True),
        attention_mask=None if mask is None else mask.to(device, non_blocking=True),
    )


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

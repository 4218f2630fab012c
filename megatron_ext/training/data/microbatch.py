"""One microbatch as the models and the losses read it. B rows, T positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from megatron_ext.alignment.coverage import ChunkCounts
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.losses import ChunkCompletions
from megatron_ext.losses.linear import MicrobatchTiles
from megatron_ext.training.cross_tokenizer.rows.batch import CrossTokenizerBatch, SideBatch


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One model's inputs."""

    tokens: torch.Tensor
    """[B, T] int64"""

    labels: torch.Tensor
    """[B, T] int64: the next token, ``IGNORE_INDEX`` where none is predicted."""

    position_ids: torch.Tensor
    """[B, T] int64, from 0 in each text."""

    attention_mask: torch.Tensor | None
    """[B, 1, T, T] bool: what a position does not see; None where that is all behind it alone."""

    byte_count: int
    """Bytes of the texts; on the host."""

    @classmethod
    def of(cls, side: SideBatch) -> TokenBatch:
        """The inputs of a side of a batch, on its device."""
        tokens = side.input_ids
        # A row of one text, and padding behind it, needs no mask: nothing looks ahead.
        is_packed = _has_several(side)
        return cls(
            tokens,
            side.labels,
            side.position_ids,
            _apart(side) if is_packed else None,
            side.byte_count,
        )


def _has_several(side: SideBatch) -> bool:
    """Whether a row holds several texts, told on the host."""
    rows, length = side.input_ids.shape
    bounds = side.cu_seqlens.tolist()
    starts = {row * length for row in range(rows + 1)}
    ends = {row * length + int(filled) for row, filled in enumerate(side.lengths.tolist())}
    return any(bound not in starts | ends for bound in bounds)


def _apart(side: SideBatch) -> torch.Tensor:
    """[B, 1, T, T] True where a position would look ahead, or into another text."""
    rows, length = side.input_ids.shape
    places = torch.arange(rows * length, device=side.cu_seqlens.device)
    text = torch.searchsorted(side.cu_seqlens.long(), places, right=True).view(rows, 1, length)
    ahead = torch.ones(length, length, dtype=torch.bool, device=places.device).triu(1)
    return ahead | (text[..., None] != text[..., None, :])


@dataclass(frozen=True, slots=True)
class Microbatch:
    """For the student and every teacher."""

    sides: CrossTokenizerBatch

    student: TokenBatch

    teachers: Mapping[str, TokenBatch]
    """By the names of the teachers."""

    chunk_counts: ChunkCounts
    """Chunks by size over all teachers, and labels in none; on the host."""

    completions: Mapping[str, ChunkCompletions] = field(default_factory=dict)
    """For ``partition_kl``, of the teachers that have a table of them."""

    tiles: Mapping[str, MicrobatchTiles] = field(default_factory=dict)
    """Where the linear form cuts it, by teacher."""

    @classmethod
    def of(
        cls,
        sides: CrossTokenizerBatch,
        completions: Mapping[str, ChunkCompletions],
        tiles: Mapping[str, MicrobatchTiles] | None = None,
    ) -> Microbatch:
        """From what a collator made, on the CPU."""
        student = TokenBatch.of(sides.student)
        return cls(
            sides=sides,
            student=student,
            teachers={
                name: student if side is sides.student else TokenBatch.of(side)
                for name, side in sides.teachers.items()
            },
            chunk_counts=sum((_counts(sides, name) for name in sides.teachers), ChunkCounts()),
            completions=completions,
            tiles=tiles or {},
        )

    @property
    def token_count(self) -> int:
        """Student labels that are trained; on the host."""
        return self.sides.token_count

    def to(self, device: torch.device) -> Microbatch:
        """The same on ``device``."""
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
        )


def _moved(batch: TokenBatch, side: SideBatch, device: torch.device) -> TokenBatch:
    """``batch`` with the tensors of ``side``, which is on ``device``."""
    mask = batch.attention_mask
    return TokenBatch(
        side.input_ids,
        side.labels,
        side.position_ids,
        None if mask is None else mask.to(device, non_blocking=True),
        batch.byte_count,
    )


def _counts(sides: CrossTokenizerBatch, name: str) -> ChunkCounts:
    """Of one teacher's alignment, on the CPU."""
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

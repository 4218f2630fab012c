"""Windows to the tensors of one microbatch. B batch, T tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_ext.alignment.batch import AlignmentBatch, pad_alignments
from megatron_ext.alignment.coverage import ChunkCounts
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.losses import ChunkCompletions, CompletionTable
from megatron_ext.training.datasets import TokenSequence, Window


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One model's inputs."""

    tokens: torch.Tensor
    """[B, T] int64"""

    labels: torch.Tensor
    """[B, T] int64: the next token, ``IGNORE_INDEX`` in the padding."""

    position_ids: torch.Tensor
    """[B, T] int64"""

    byte_count: int
    """Bytes of the text that the labels stand for; on the host."""

    def to(self, device: torch.device) -> TokenBatch:
        """The same batch on ``device``."""
        return TokenBatch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.byte_count,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch for both models."""

    student: TokenBatch
    teacher: TokenBatch | None
    alignment: AlignmentBatch | None

    token_count: int
    """Student labels that are trained; on the host."""

    chunk_counts: ChunkCounts
    """Chunks by size, and labels in none; on the host."""

    completions: ChunkCompletions | None = None
    """For ``partition_kl``, where the collator has a table of them."""

    @property
    def chunk_count(self) -> int:
        """Chunks that the distillation loss sums over; on the host."""
        return self.chunk_counts.chunks

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return replace(
            self,
            student=self.student.to(device),
            teacher=self.teacher.to(device) if self.teacher else None,
            alignment=self.alignment.to(device) if self.alignment else None,
            completions=self.completions.to(device) if self.completions else None,
        )


def collate(
    windows: Sequence[Window],
    *,
    student_length: int,
    teacher_length: int | None = None,
    text_only: bool = False,
    completion_table: CompletionTable | None = None,
) -> Batch:
    """Pad windows on the right to the models' sequence lengths.

    Args:
        windows: B windows.
        student_length: Ts.
        teacher_length: Tt; None leaves the teacher out.
        text_only: Train no control token, so that a sum over labels is a sum over the text.
        completion_table: Looks up the completions of each chunk.
    """
    student = _pad([window.student for window in windows], student_length, text_only)
    teacher = alignment = completions = None
    if teacher_length is not None:
        teacher_sides = [window.teacher for window in windows if window.teacher is not None]
        teacher = _pad(teacher_sides, teacher_length, text_only)
        alignment = pad_alignments(
            [
                (window.student.chunk_id, side.chunk_id)
                for window, side in zip(windows, teacher_sides, strict=True)
            ],
            student_length=student_length,
            teacher_length=teacher_length,
        )
        if completion_table is not None:
            completions = ChunkCompletions.of(
                alignment, student.labels, teacher.labels, completion_table
            )
    return Batch(
        student=student,
        teacher=teacher,
        alignment=alignment,
        token_count=int((student.labels != IGNORE_INDEX).sum()),
        chunk_counts=_chunk_counts(student, teacher, alignment),
        completions=completions,
    )


def _chunk_counts(
    student: TokenBatch, teacher: TokenBatch | None, alignment: AlignmentBatch | None
) -> ChunkCounts:
    if teacher is None or alignment is None:
        return ChunkCounts()
    unaligned = (
        int(((batch.labels != IGNORE_INDEX) & (chunk_id == NO_CHUNK)).sum())
        for batch, chunk_id in (
            (student, alignment.student_chunk_id),
            (teacher, alignment.teacher_chunk_id),
        )
    )
    return ChunkCounts.of_classes(
        alignment.chunk_class.numpy(),
        student_unaligned=next(unaligned),
        teacher_unaligned=next(unaligned),
    )


def _pad(sequences: Sequence[TokenSequence], length: int, text_only: bool) -> TokenBatch:
    tokens = np.zeros((len(sequences), length), dtype=np.int64)
    labels = np.full((len(sequences), length), IGNORE_INDEX, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        count = len(sequence.ids) - 1
        tokens[row, :count] = sequence.ids[:-1]
        labels[row, :count] = sequence.ids[1:]
        if text_only:
            labels[row, :count][sequence.text_bytes[1:] == 0] = IGNORE_INDEX
    return TokenBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        position_ids=torch.arange(length).expand(len(sequences), length),
        byte_count=sum(int(sequence.text_bytes[1:].sum()) for sequence in sequences),
    )

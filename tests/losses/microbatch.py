"""Random inputs of an objective. B batch, T tokens, V vocabularies, C chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import (
    DistillationInputs,
    KnownAhead,
    ProjectionShard,
    TeacherTargets,
    VocabularyMatch,
)
from tests.ops.kernel_case import columns_of, vocab_shard
from tests.ops.projected_kl_case import random_chunks, random_projection

PAD_LOGIT = 40.0
"""Padded columns hold this, far above the real logits."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Unsharded, unpadded fp32 tensors of several samples, every sample with chunks of its own."""

    student_logits: torch.Tensor
    teacher_logits: torch.Tensor
    labels: torch.Tensor
    chunk_ids: list[tuple[torch.Tensor, torch.Tensor]]
    """A sample's ids from 0, student [Ts] and teacher [Tt]."""
    projection: torch.Tensor

    @classmethod
    def random(
        cls,
        *,
        batch: int = 3,
        lengths: tuple[int, int] = (8, 6),
        vocabs: tuple[int, int] = (37, 23),
        chunks: int = 4,
        seed: int = 0,
    ) -> Microbatch:
        generator = torch.Generator().manual_seed(seed)
        logits = [
            3 * torch.randn(batch, length, vocab, generator=generator)
            for length, vocab in zip(lengths, vocabs, strict=True)
        ]
        labels = torch.randint(0, vocabs[0], (batch, lengths[0]), generator=generator)
        labels[:, -2:] = IGNORE_INDEX
        pairs = [random_chunks(lengths, chunks, seed * batch + row) for row in range(batch)]
        return cls(
            student_logits=logits[0],
            teacher_logits=logits[1],
            labels=labels,
            chunk_ids=[(student, teacher) for student, teacher in pairs],
            projection=random_projection(*vocabs).float(),
        )

    def samples(self, rows: slice) -> Microbatch:
        """The microbatch of some of the samples."""
        return replace(
            self,
            student_logits=self.student_logits[rows],
            teacher_logits=self.teacher_logits[rows],
            labels=self.labels[rows],
            chunk_ids=self.chunk_ids[rows],
        )

    def without_work(self) -> Microbatch:
        """The microbatch with no chunk and no label."""
        nothing = [(torch.full_like(s, -1), torch.full_like(t, -1)) for s, t in self.chunk_ids]
        labels = torch.full_like(self.labels, IGNORE_INDEX)
        return replace(self, chunk_ids=nothing, labels=labels)

    def alignment(self) -> AlignmentBatch:
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        count = 0
        for pair in self.chunk_ids:
            for side, ids in zip(sides, pair, strict=True):
                side.append(torch.where(ids >= 0, ids + count, -1))
            count += int(pair[0].max()) + 1
        return AlignmentBatch.from_chunk_ids(torch.stack(sides[0]), torch.stack(sides[1]))

    def inputs(
        self, *, rank: int = 0, ranks: int = 1, group: Any = None, padding: tuple[int, int] = (0, 0)
    ) -> DistillationInputs:
        """One rank's view; the student's logits are a leaf that requires a gradient."""
        student, teacher = (
            vocab_shard(logits.shape[-1], extra, rank, ranks, group)
            for logits, extra in zip(
                (self.student_logits, self.teacher_logits), padding, strict=True
            )
        )
        common = torch.arange(0, min(student.vocab_size, teacher.vocab_size), 2)
        return DistillationInputs(
            student_logits=columns(self.student_logits, student).requires_grad_(),
            student_shard=student,
            labels=self.labels,
            teacher=TeacherTargets(
                kind="logits", shard=teacher, logits=columns(self.teacher_logits, teacher)
            ),
            alignment=self.alignment(),
            projection=projection_shard(self.projection, student, teacher),
            # Backwards, so that partners lie in different shards.
            match=VocabularyMatch(common_student=common, common_teacher=common.flip(0)),
            teacher_labels=torch.arange(self.teacher_logits.shape[1]).expand(
                self.teacher_logits.shape[:2]
            ),
        )


def known_ahead(inputs: DistillationInputs) -> KnownAhead:
    """What the data gives of some inputs before the student has run."""
    return KnownAhead(
        labels=inputs.labels,
        alignment=inputs.alignment,
        chunk_mask=inputs.chunk_mask,
        teacher_labels=inputs.teacher_labels,
    )


def columns(full: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """This shard's columns of unpadded ``full`` [..., V]."""
    return columns_of(full, shard, PAD_LOGIT)


def csr_arrays(dense: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """indptr int64, indices int32, values float32."""
    row, column = dense.nonzero(as_tuple=True)
    counts = np.bincount(row.numpy(), minlength=len(dense))
    indptr = np.concatenate([[0], counts.cumsum()]).astype(np.int64)
    values = dense[row, column].numpy().astype(np.float32)
    return indptr, column.numpy().astype(np.int32), values


def projection_shard(
    dense: torch.Tensor, student: VocabShard, teacher: VocabShard
) -> ProjectionShard:
    return ProjectionShard.from_csr(
        *csr_arrays(dense),
        shape=(dense.shape[0], dense.shape[1]),
        student_shard=student,
        teacher_shard=teacher,
    )

"""Alignments of one microbatch as tensors. B batch, T tokens, C chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

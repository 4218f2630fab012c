"""The sorted L1 of logits with a graph; ``evaluation.py`` has what it computes."""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.sorted_l1.evaluation import ChunkSortedL1, evaluate_sorted_l1
from megatron_ext.ops.unit_gradient import kept_gradient


def chunk_sorted_l1(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_chunk_id: torch.Tensor,
    teacher_chunk_id: torch.Tensor,
    chunk_count: int,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    temperature: float = 1.0,
    top_u: int | None = None,
    announced: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> ChunkSortedL1:
    """``evaluate_sorted_l1`` of rows by chunk id, with a graph from ``chunk_loss`` to the student.

    Args:
        student_chunk_id: int64 [Ts], negative for rows of no chunk.
        teacher_chunk_id: int64 [Tt].
        in_place: Write the gradient over ``student_logits``, which nobody may read afterwards.

    Keeps the gradient [Ts, Vps] for backward, which has no collectives.
    """
    student_rows = ChunkRows.of(student_chunk_id, chunk_count)
    teacher_rows = ChunkRows.of(teacher_chunk_id, chunk_count)

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> ChunkSortedL1:
        return evaluate_sorted_l1(
            logits,
            teacher_logits.detach(),
            student_rows=student_rows,
            teacher_rows=teacher_rows,
            student_shard=student_shard,
            teacher_shard=teacher_shard,
            temperature=temperature,
            top_u=top_u,
            announced=announced,
            gradient=gradient,
            implementation=implementation,
        )

    outputs = kept_gradient(
        student_logits,
        evaluate,
        grad_scale=announced,
        slots=student_rows.slots,
        in_place=in_place,
        implementation=implementation,
    )
    return ChunkSortedL1(*outputs)

"""The matched divergence with a graph; ``evaluation.py`` has what it computes."""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.matched_divergence.comparison import Comparing
from megatron_ext.ops.matched_divergence.evaluation import evaluate_matched_divergence
from megatron_ext.ops.matched_divergence.matching import Matching
from megatron_ext.ops.matched_divergence.values import MatchedDivergence
from megatron_ext.ops.unit_gradient import kept_gradient


def matched_divergence(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_chunk_id: torch.Tensor,
    teacher_chunk_id: torch.Tensor,
    chunk_count: int,
    matching: Matching,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    comparing: Comparing = Comparing(),  # noqa: B008 - a tuple of constants
    announced: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> MatchedDivergence:
    """``evaluate_matched_divergence`` of rows by chunk id, with a graph from ``chunk_loss``.

    Args:
        student_chunk_id: int64 [Ts], negative for rows of no chunk.
        teacher_chunk_id: int64 [Tt].
        in_place: Write the gradient over ``student_logits``, which nobody may read afterwards.

    Keeps the gradient [Ts, Vps] for backward, which has no collectives.
    """
    student_rows = ChunkRows.of(student_chunk_id, chunk_count)
    teacher_rows = ChunkRows.of(teacher_chunk_id, chunk_count)

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> MatchedDivergence:
        return evaluate_matched_divergence(
            logits,
            teacher_logits.detach(),
            student_rows=student_rows,
            teacher_rows=teacher_rows,
            matching=matching,
            student_shard=student_shard,
            teacher_shard=teacher_shard,
            comparing=comparing,
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
    return MatchedDivergence(*outputs)

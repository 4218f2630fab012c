"""The sorted L1 of logits with a graph; ``evaluation.py`` has what it computes."""

from __future__ import annotations

import torch

from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.sorted_l1.evaluation import ChunkSortedL1, evaluate_sorted_l1
from megatron_ext.ops.unit_gradient import kept_gradient


def chunk_sorted_l1(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    *,
    temperature: float = 1.0,
    top_u: int | None = None,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> ChunkSortedL1:
    """``evaluate_sorted_l1`` with a graph from ``chunk_loss`` to the student's logits.

    Args:
        in_place: Write the gradient over the student's logits, which nobody may read afterwards.

    Keeps the gradient [Ts, Vps] for backward, which has no collectives.
    """

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> ChunkSortedL1:
        return evaluate_sorted_l1(
            student._replace(logits=logits),
            teacher,
            temperature=temperature,
            top_u=top_u,
            grad_scale=grad_scale,
            gradient=gradient,
            implementation=implementation,
        )

    values = kept_gradient(
        student.logits,
        evaluate,
        grad_scale=grad_scale,
        slots=student.rows.slots,
        in_place=in_place,
        implementation=implementation,
    )
    return ChunkSortedL1(*values)

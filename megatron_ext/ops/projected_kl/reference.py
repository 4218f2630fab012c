"""Projected KL straight from its formula, dense and unsharded. T rows, V columns, C chunks.

The truth that ``function.py`` is tested against; differentiable by autograd, in fp64 if given fp64.
"""

from __future__ import annotations

import torch

from megatron_ext.ops.chunk_reduce.reference import chunk_mean_softmax_reference


def projected_kl_reference(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_chunk_id: torch.Tensor,
    teacher_chunk_id: torch.Tensor,
    chunk_count: int,
    projection: torch.Tensor,
    temperature: float = 1.0,
    direction: str = "forward",
) -> torch.Tensor:
    """``tau^2 * sum_c KL_c`` (README, equations 1 to 5).

    Args:
        student_logits: [Ts, Vs]
        teacher_logits: [Tt, Vt]
        student_chunk_id: int64 [Ts], negative for rows of no chunk.
        teacher_chunk_id: int64 [Tt]
        projection: dense [Vs, Vt].

    Returns:
        Scalar in the logits' dtype.
    """
    student = chunk_mean_softmax_reference(
        student_logits, student_chunk_id, chunk_count, temperature=temperature
    )
    reachable = (projection > 0).any(dim=0)
    projected = student @ projection[:, reachable]
    q = projected / projected.sum(dim=-1, keepdim=True)
    p = chunk_mean_softmax_reference(
        teacher_logits[:, reachable], teacher_chunk_id, chunk_count, temperature=temperature
    )
    first, second = (p, q) if direction == "forward" else (q, p)
    return temperature**2 * (torch.xlogy(first, first) - torch.xlogy(first, second)).sum()

"""Projected KL straight from its formula, dense and unsharded. T rows, V columns, C chunks.

The truth that the operation is tested against; differentiable by autograd, in fp64 if given fp64.
"""

from __future__ import annotations

import torch

from megatron_ext.ops.chunk_distributions.model_rows import chunk_mean_softmax_reference
from megatron_ext.ops.divergence import divergence_reference


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
    mixture: float = 0.5,
    vocab_topk: int | None = None,
) -> torch.Tensor:
    """``tau^2 D_c`` of each chunk [C] (README, equations 1 to 5).

    Args:
        student_logits: [Ts, Vs]
        teacher_logits: [Tt, Vt]
        student_chunk_id: int64 [Ts], negative for rows of no chunk.
        teacher_chunk_id: int64 [Tt]
        projection: dense [Vs, Vt].
    """
    reachable = (projection > 0).any(dim=0)
    student = _scaled_means(student_logits / temperature, student_chunk_id, chunk_count, projection)
    projected = student @ projection[:, reachable]
    q = projected / projected.sum(dim=-1, keepdim=True)
    p = chunk_mean_softmax_reference(
        teacher_logits[:, reachable], teacher_chunk_id, chunk_count, temperature=temperature
    )
    if vocab_topk is not None and vocab_topk < p.shape[-1] and len(p):
        p, q = _pooled(p, q, vocab_topk)
    loss = divergence_reference(p, q, direction=direction, mixture=mixture)
    return temperature**2 * loss


def _scaled_means(
    scaled: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int, projection: torch.Tensor
) -> torch.Tensor:
    """``mean_i q_i`` [C, Vs] of the mapped columns, 0 in others, times a constant of the chunk.

    Q_c does not depend on it, and the mapped columns do not underflow beside the others.
    """
    log_q = torch.log_softmax(scaled, dim=-1)
    log_q = log_q.masked_fill(~(projection > 0).any(dim=1), -torch.inf)
    means = []
    for chunk in range(chunk_count):
        rows = log_q[chunk_id == chunk]
        means.append((rows - rows.detach().max()).exp().mean(dim=0))
    return torch.stack(means) if means else log_q[:0]


def _pooled(p: torch.Tensor, q: torch.Tensor, vocab_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on the columns of the largest ``p`` of each chunk, and on the rest as one."""
    columns = p.topk(vocab_topk, dim=-1).indices
    sides = []
    for side in (p, q):
        kept = side.gather(-1, columns)
        rest = side.scatter(-1, columns, 0.0).sum(dim=-1, keepdim=True)
        sides.append(torch.cat([kept, rest], dim=-1))
    return sides[0], sides[1]

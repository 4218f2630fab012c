"""Both models' mean distributions over chunks. T rows, Vp local columns, C chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    local_log_sum_exp,
    merge_log_sum_exp,
    scaled_logits,
)
from megatron_ext.ops.chunk_reduce import chunk_mean_softmax, chunk_sizes, chunk_slots


def chunk_distributions(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_chunk_id: torch.Tensor,
    teacher_chunk_id: torch.Tensor,
    chunk_count: int,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of ``softmax(logits / temperature)`` over the rows of each chunk (README, 1 and 2).

    Args:
        student_logits: [Ts, Vps], any float dtype; the only argument with a gradient.
        teacher_logits: [Tt, Vpt], any float dtype.
        student_chunk_id: int64 [Ts], negative for rows of no chunk.
        teacher_chunk_id: int64 [Tt].
        student_shard: Columns of this rank, on the same group as the teacher's.

    Returns:
        [C, Vps] with a graph and [C, Vpt] without, fp32 (fp64 for fp64 logits). Zero in padding,
        and in chunks without rows. Forward: two all-reduces of [Ts + Tt]. Backward: one of [T'] a
        slice of T' student rows.
    """
    student = _rows(student_logits, student_chunk_id, chunk_count, student_shard)
    teacher = _rows(teacher_logits, teacher_chunk_id, chunk_count, teacher_shard)
    local = [local_log_sum_exp(side[0], temperature, side[3]) for side in (student, teacher)]
    peaks, totals = (torch.cat(parts) for parts in zip(*local, strict=True))
    merged = merge_log_sum_exp(peaks, totals, student_shard.group)
    first, second = (
        LogSumExp(*parts)
        for parts in zip(
            *(part.split([len(student_chunk_id), len(teacher_chunk_id)]) for part in merged),
            strict=True,
        )
    )
    q: torch.Tensor = _ChunkMeans.apply(
        student_logits, *first, student[1], student[2], student_shard, temperature
    )
    logits, slots, sizes, excluded = teacher
    p = chunk_mean_softmax(logits, second, slots, sizes, temperature=temperature, excluded=excluded)
    return q, p


def _rows(
    logits: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits without a graph, slots [T], slot sizes [C + 1] and excluded columns."""
    slots = chunk_slots(chunk_id, chunk_count)
    sizes = chunk_sizes(slots, chunk_count, accumulation_dtype(logits.dtype))
    return logits.detach(), slots, sizes, shard.excluded_columns(logits.device)


class _ChunkMeans(torch.autograd.Function):
    """Keeps the logits, their log-sum-exp and the rows' slots."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        peak: torch.Tensor,
        log_sum: torch.Tensor,
        slots: torch.Tensor,
        sizes: torch.Tensor,
        shard: VocabShard,
        temperature: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, peak, log_sum, slots, sizes)
        ctx.shard, ctx.temperature = shard, temperature
        return chunk_mean_softmax(
            logits.detach(),
            LogSumExp(peak, log_sum),
            slots,
            sizes,
            temperature=temperature,
            excluded=shard.excluded_columns(logits.device),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, peak, log_sum, slots, sizes = ctx.saved_tensors
        lse, group = LogSumExp(peak, log_sum), ctx.shard.group
        excluded = ctx.shard.excluded_columns(logits.device)
        last = sizes.shape[0] - 1
        # Rows of no chunk read the gradient of some chunk and are zeroed at the end.
        padded = grad if last else grad.new_zeros(1, grad.shape[1])
        chunk, scale = slots.clamp(max=max(last - 1, 0)), sizes[slots].mul(ctx.temperature)
        unused = (slots == last)[:, None]
        out = torch.empty_like(logits)
        for rows in row_slices(*logits.shape, device=logits.device):
            scaled = scaled_logits(logits[rows], ctx.temperature, excluded)
            probs = lse.normalise_(scaled, rows).exp_()
            row_grad = padded[chunk[rows]].div_(scale[rows, None])
            centre = all_reduce_sum((probs * row_grad).sum(dim=-1, keepdim=True), group)
            out[rows] = probs.mul_(row_grad.sub_(centre)).masked_fill_(unused[rows], 0.0)
        return out, None, None, None, None, None, None

"""P-KL, GOLD and H-KL with the numerics of NeMo RL's x_token, for comparison with its runs.

Source: NVIDIA-NeMo/RL at 7ea279a, ``nemo_rl/algorithms`` (x_token loss), by its behaviour;
``docs/losses.md`` lists its faults. T rows, Vps Vpt columns, K of them, C chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import (
    all_reduce_sum,
    gather_columns,
    group_size,
    sum_over_shards,
)
from megatron_ext.distributed.vocab_parallel import (
    VocabShard,
    log_softmax,
    row_slices,
    scaled_logits,
    vocab_argmax,
)
from megatron_ext.losses.base import DistillationInputs, LossOutput
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.matched_columns import MatchedColumns
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.ops.chunk_rows import chunk_slots
from megatron_ext.ops.matched_divergence import onto_student_columns
from megatron_ext.ops.sorted_l1 import sorted_l1

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_ext.losses.targets import TeacherTargets


def chunk_means(values: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int) -> torch.Tensor:
    """Mean [C, K] of ``values`` [T, K] over the rows of each chunk, under autograd.

    Args:
        chunk_id: int64 [T], ``NO_CHUNK`` for rows outside every chunk.
    """
    slots = chunk_slots(chunk_id, chunk_count)
    sizes = values.new_zeros(chunk_count + 1).index_add_(0, slots, torch.ones_like(values[:, 0]))
    sums = values.new_zeros(chunk_count + 1, values.shape[-1]).index_add(0, slots, values)
    return (sums / sizes.clamp_(min=1)[:, None])[:-1]


_EPSILON = 1e-10


def nemo_projected_kl(
    inputs: DistillationInputs,
    teacher: TeacherTargets,
    projection: ProjectionShard,
    *,
    temperature: float,
    is_reverse: bool,
    vocab_topk: int | None,
    usable: torch.Tensor | None,
) -> LossOutput:
    """``tau^2 * sum_c KL_c`` over teacher columns K.

        K    the ``vocab_topk`` columns of the largest raw teacher logit at any position
        Q_c  = mean_i softmax(z_i / tau) W[:, K], over (its sum + 1e-10)
        L_c  = mean_j log_softmax(y_j[K] / tau), not normalised again
        KL_c = sum exp(L_c) (L_c - log(Q_c + 1e-10));  reverse: sum Q_c (log(Q_c + 1e-10) - L_c)

    The original divides by the chunks of the microbatch; here the count is returned beside the sum.
    Since K is chosen for a microbatch, the value depends on how a batch is cut into them, unless
    ``vocab_topk`` is None, for all columns. Two equal models have a loss above 0 on chunks
    of several tokens. ``usable``: bool [C], chunks that may count.

    Metric: ``top1_agreement`` over K. Plain autograd keeps fp32 [Ts, Vps]. Collectives: forward
    four all-reduces of vectors, two all-gathers of [K] and two all-reduces of [C, K]; backward one
    all-reduce of [Ts].
    """
    alignment = inputs.alignment
    assert alignment is not None
    count = alignment.chunk_count
    logits = teacher.to_logits().flatten(0, 1).detach()
    columns = _largest_columns(logits, teacher.shard, vocab_topk or teacher.shard.vocab_size)
    probs = log_softmax(
        inputs.student_logits.flatten(0, 1), inputs.student_shard, temperature=temperature
    ).exp()
    means = chunk_means(probs, alignment.student_chunk_id.flatten(), count)
    partial: torch.Tensor = _ProjectColumns.apply(means, projection, columns)
    q = sum_over_shards(partial, inputs.student_shard.group)
    q = q / (q.sum(dim=-1, keepdim=True) + _EPSILON)
    log_q = (q + _EPSILON).log()
    log_p = _teacher_means(
        logits, alignment.teacher_chunk_id.flatten(), count, columns, teacher.shard, temperature
    ).to(q.dtype)
    kl = q * (log_q - log_p) if is_reverse else log_p.exp() * (log_p - log_q)
    agreement = q.argmax(dim=-1) == log_p.argmax(dim=-1)
    return chunk_output(
        inputs,
        temperature**2 * kl.sum(dim=-1),
        usable=usable,
        means={"top1_agreement": agreement},
    )


def _largest_columns(logits: torch.Tensor, shard: VocabShard, count: int) -> torch.Tensor:
    """Columns of the largest logits at any position, in a chunk or not; int64 [K] ascending."""
    scaled = scaled_logits(logits, 1.0, shard.excluded_columns(logits.device))
    importance = scaled.amax(dim=0)[None]
    values, local = importance.sort(dim=-1, descending=True, stable=True)
    kept = min(count, shard.width)
    values = gather_columns(values[:, :kept], shard.group)
    ids = gather_columns(local[:, :kept] + shard.start, shard.group)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return ids[0, order[0, : min(count, shard.vocab_size)]].sort().values


@torch.no_grad()
def _teacher_means(
    logits: torch.Tensor,
    chunk_id: torch.Tensor,
    count: int,
    columns: torch.Tensor,
    shard: VocabShard,
    temperature: float,
) -> torch.Tensor:
    """``L_c`` [C, K], the same on every rank."""
    local = columns - shard.start
    here = (local >= 0) & (local < shard.width)
    local = torch.where(here, local, shard.width)
    chosen = torch.zeros(shard.width + 1, dtype=torch.bool, device=logits.device)
    chosen[local] = True
    log_probs = log_softmax(logits, shard, temperature=temperature, valid=chosen[:-1])
    picked = log_probs[:, local.clamp(max=shard.width - 1)].masked_fill(~here, 0.0)
    return all_reduce_sum(chunk_means(picked, chunk_id, count), shard.group)


class _ProjectColumns(torch.autograd.Function):
    """``(means @ W)[:, columns]`` [C, K] of this rank's rows of W; a slice of chunks at a time."""

    @staticmethod
    def forward(
        ctx: Any, means: torch.Tensor, projection: ProjectionShard, columns: torch.Tensor
    ) -> torch.Tensor:
        onto_teacher = projection.weight_transposed.to(means.dtype).t()
        out = means.new_empty(means.shape[0], columns.shape[0])
        for rows in row_slices(means.shape[0], onto_teacher.shape[1], device=means.device):
            out[rows] = (means[rows] @ onto_teacher)[:, columns]
        ctx.save_for_backward(columns)
        ctx.weight = projection.weight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (columns,) = ctx.saved_tensors
        width, teacher_vocab = ctx.weight.shape
        onto_student = ctx.weight.to(grad.dtype).t()
        out = grad.new_empty(grad.shape[0], width)
        for rows in row_slices(grad.shape[0], teacher_vocab, device=grad.device):
            spread = grad.new_zeros(grad[rows].shape[0], teacher_vocab)
            out[rows] = spread.index_copy_(1, columns, grad[rows]) @ onto_student
        return out, None, None


def nemo_gold(
    inputs: DistillationInputs,
    teacher: TeacherTargets,
    columns: MatchedColumns,
    *,
    temperature: float,
    is_reverse: bool,
    uncommon_weight: float,
    uncommon_topk: int | None,
) -> LossOutput:
    """``tau^2 * sum_c ( KL_c + w L1_c )``.

        A_c, B_c  means of log_softmax over student and teacher rows, not normalised again
        KL_c      sum over common tokens of exp(B) (B - A);  reverse: exp(A) (A - B)
        L1_c      sum of |sort(exp A) - sort(exp B)| over uncommon tokens, the largest
                  min(|U_s|, |U_t|, ``uncommon_topk``) of each

    The original divides by the chunks of the microbatch; here the count is returned beside the sum.
    Neither part compares distributions: ``KL_c`` can be negative, and where both are equal it has
    neither its minimum nor a zero gradient.

    Metrics: ``kl_common``, ``l1_uncommon``, ``top1_agreement`` over common tokens. Plain autograd
    keeps fp32 [Ts, Vps] and several [C, Vps]. Collectives: forward nine all-reduces of vectors
    and, a slice of chunks, one reduce-scatter of [C', Vs] and one all-gather; backward one
    all-reduce of [Ts].
    """
    alignment = inputs.alignment
    assert alignment is not None
    shard, count = inputs.student_shard, alignment.chunk_count
    matching, excluded = columns.matching, columns.matching.excluded(shard, teacher.shard)
    student = chunk_means(
        log_softmax(inputs.student_logits.flatten(0, 1), shard, temperature=temperature),
        alignment.student_chunk_id.flatten(),
        count,
    )
    with torch.no_grad():
        log_p = log_softmax(
            teacher.to_logits().flatten(0, 1), teacher.shard, temperature=temperature
        )
        log_p = chunk_means(log_p, alignment.teacher_chunk_id.flatten(), count).to(student.dtype)
        moved = _moved(log_p, matching.student_column, shard.width, shard.group)

    common = matching.is_common
    log_q = torch.where(common, student, 0.0)
    terms = log_q.exp() * (log_q - moved) if is_reverse else moved.exp() * (moved - log_q)
    kl = sum_over_shards(torch.where(common, terms, 0.0).sum(dim=-1), shard.group)
    l1 = sorted_l1(
        student.exp(),
        log_p.exp(),
        student_excluded=excluded[0],
        teacher_excluded=excluded[1],
        largest=_places(columns, uncommon_topk),
        group=shard.group,
    ).value
    tops = [
        vocab_argmax(side.detach().masked_fill(~common, -torch.inf), shard)
        for side in (student, moved)
    ]
    return chunk_output(
        inputs,
        temperature**2 * (kl + uncommon_weight * l1),
        means={"kl_common": kl, "l1_uncommon": l1, "top1_agreement": tops[0] == tops[1]},
    )


def _places(columns: MatchedColumns, uncommon_topk: int | None) -> int:
    """Number of compared places: the smaller side's uncommon tokens, at most ``uncommon_topk``."""
    both = min(columns.student_rest, columns.teacher_rest)
    return both if uncommon_topk is None else min(both, uncommon_topk)


def _moved(
    values: torch.Tensor, student_column: torch.Tensor, width: int, group: ProcessGroup | None
) -> torch.Tensor:
    """``values`` [C, Vpt] of matched columns in the student's columns [C, width]."""
    out = values.new_empty(values.shape[0], width)
    for rows in row_slices(values.shape[0], width * group_size(group), device=values.device):
        out[rows] = onto_student_columns(values[rows], student_column, width, group)
    return out

"""Projected KL over vocabulary shards, gradient by hand. T rows, Vp local columns, C chunks.

Equations and memory are in the README; ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import (
    all_reduce_sum,
    gather_columns,
    group_size,
    sum_columns,
)
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    local_argmax,
    local_log_sum_exp,
    merge_argmax,
    merge_log_sum_exp,
    scaled_logits,
)
from megatron_ext.ops.chunk_reduce import chunk_mean_softmax, chunk_sizes, chunk_slots

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KLDirection = Literal["forward", "reverse"]


class ProjectedKL(NamedTuple):
    """Scalars, replicated over the group; only ``loss_sum`` has a graph."""

    loss_sum: torch.Tensor
    """tau^2 times the sum of KL_c over the chunks."""

    teacher_entropy_sum: torch.Tensor
    """Entropy of P_c in nats, summed over the chunks."""

    agreement_sum: torch.Tensor
    """Chunks in which Q_c and P_c have the same largest column."""

    offsupport_sum: torch.Tensor
    """Teacher mass on columns the projection cannot reach, summed over rows in a chunk."""

    teacher_rows: torch.Tensor
    """int64: teacher rows in a chunk."""


def projected_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_chunk_id: torch.Tensor,
    teacher_chunk_id: torch.Tensor,
    chunk_count: int,
    weight: torch.Tensor,
    weight_transposed: torch.Tensor,
    row_mass: torch.Tensor,
    reachable: torch.Tensor,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    temperature: float = 1.0,
    direction: KLDirection = "forward",
) -> ProjectedKL:
    """``tau^2 * sum_c KL(P_c || Q_c)``, or ``KL(Q_c || P_c)`` for ``reverse``.

    Args:
        student_logits: [Ts, Vps], any float dtype; the only argument with a gradient.
        teacher_logits: [Tt, Vpt], any float dtype.
        student_chunk_id: int64 [Ts], negative for rows of no chunk.
        teacher_chunk_id: int64 [Tt].
        weight: CSR [Vps, Vt], this rank's rows of the projection and all its columns.
        weight_transposed: CSR [Vt, Vps], the same entries.
        row_mass: [Vps], sum of each row of ``weight``.
        reachable: bool [Vpt], this rank's teacher columns with an entry in any rank's ``weight``.

    Everything is accumulated in fp32 (fp64 for fp64 logits). Collectives on the shards' group,
    equally many on every rank and independent of the data: forward 8 all-reduces of [T] or [C] and
    one reduce-scatter of [C', Vt] a slice of C' chunks; backward one all-gather a slice of chunks
    and one all-reduce of [T'] a slice of student rows.
    """
    student = _Side.build(student_logits, student_chunk_id, chunk_count, student_shard)
    teacher = _Side.build(teacher_logits, teacher_chunk_id, chunk_count, teacher_shard)
    teacher_probs, offsupport_sum = _teacher_chunks(teacher, reachable, temperature)
    loss_sum, entropy_sum, agreement_sum = _ProjectedKL.apply(
        student_logits,
        student,
        teacher_probs,
        teacher_shard,
        (weight, weight_transposed, row_mass),
        temperature,
        direction,
    )
    teacher_rows = (teacher_chunk_id >= 0).sum()
    return ProjectedKL(loss_sum, entropy_sum, agreement_sum, offsupport_sum, teacher_rows)


class _Side(NamedTuple):
    """One model's rows and how they fall into chunks."""

    logits: torch.Tensor
    slots: torch.Tensor
    sizes: torch.Tensor
    excluded: torch.Tensor | None
    shard: VocabShard

    @classmethod
    def build(
        cls, logits: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int, shard: VocabShard
    ) -> _Side:
        slots = chunk_slots(chunk_id, chunk_count)
        sizes = chunk_sizes(slots, chunk_count, accumulation_dtype(logits.dtype))
        excluded = shard.excluded_columns(logits.device)
        return cls(logits.detach(), slots, sizes, excluded, shard)

    def chunk_means(
        self, lse: LogSumExp, temperature: float, excluded: torch.Tensor | None
    ) -> torch.Tensor:
        return chunk_mean_softmax(
            self.logits, lse, self.slots, self.sizes, temperature=temperature, excluded=excluded
        )


@torch.no_grad()
def _teacher_chunks(
    teacher: _Side, reachable: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """P_c [C, Vpt] over the reachable columns, and the mass they leave out. Two all-reduces."""
    unreached = teacher.shard.excluded_columns(teacher.logits.device, reachable)
    columns = (teacher.excluded, unreached)
    local = [local_log_sum_exp(teacher.logits, temperature, excluded) for excluded in columns]
    # Both in one pair of all-reduces.
    peaks, totals = (torch.stack(parts) for parts in zip(*local, strict=True))
    merged = merge_log_sum_exp(peaks, totals, teacher.shard.group)
    whole, reached = (LogSumExp(*parts) for parts in zip(*merged, strict=True))
    used = teacher.slots < teacher.sizes.shape[0] - 1
    left_out = -torch.expm1((reached.peak - whole.peak).add_(reached.log_sum).sub_(whole.log_sum))
    offsupport_sum = torch.where(used, left_out, 0.0).sum()
    return teacher.chunk_means(reached, temperature, unreached), offsupport_sum


class _ProjectedKL(torch.autograd.Function):
    """Keeps the student's logits, their lse [Ts] and dL/dQ~ [C, Vpt] for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: torch.Tensor,
        student: _Side,
        teacher_probs: torch.Tensor,
        teacher_shard: VocabShard,
        projection: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        temperature: float,
        direction: KLDirection,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, weight_transposed, row_mass = projection
        group = student.shard.group
        local = local_log_sum_exp(student.logits, temperature, student.excluded)
        lse = merge_log_sum_exp(*local, group)
        means = student.chunk_means(lse, temperature, student.excluded)
        # The projection follows the logits: fp64 in a gradient check, else fp32.
        onto_teacher = weight_transposed.to(means.dtype).t()
        mass = all_reduce_sum(means @ row_mass.to(means.dtype), group).clamp_(min=_floor(means))

        grad = torch.empty_like(teacher_probs, dtype=means.dtype)
        sums = means.new_zeros(2, mass.shape[0])
        best, column = means.new_zeros(2, mass.shape[0]), torch.zeros_like(sums, dtype=torch.int64)
        onto_width = teacher_shard.width * group_size(group)
        for rows in row_slices(mass.shape[0], onto_width, device=mass.device):
            q = sum_columns(means[rows] @ onto_teacher, teacher_shard.width, group)
            p = teacher_probs[rows].to(q.dtype)
            for side, values in enumerate((p, q)):
                best[side, rows], column[side, rows] = local_argmax(values, teacher_shard)
            grad[rows], *parts = _compare(p, q, mass[rows, None], direction)
            sums[:, rows] = torch.stack(parts)

        kl, entropy = all_reduce_sum(sums, group)
        if direction == "reverse":
            grad.sub_((kl / mass)[:, None])
        p_top, q_top = merge_argmax(best, column, group)

        ctx.save_for_backward(student_logits, *lse, student.slots, student.sizes, grad)
        ctx.student, ctx.weight, ctx.temperature = student.shard, weight, temperature
        outputs = (temperature**2 * kl.sum(), entropy.sum(), (p_top == q_top).to(kl.dtype).sum())
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        logits, peak, log_sum, slots, sizes, grad_projected = ctx.saved_tensors
        lse = LogSumExp(peak, log_sum)
        group, temperature = ctx.student.group, ctx.temperature
        chunk_grad = _onto_student(grad_projected, ctx.weight, group, sizes)
        excluded = ctx.student.excluded_columns(logits.device)
        unused = (slots == sizes.shape[0] - 1)[:, None]
        out = torch.empty_like(logits)
        for rows in row_slices(*logits.shape, device=logits.device):
            scaled = scaled_logits(logits[rows], temperature, excluded)
            probs = lse.normalise_(scaled, rows).exp_()
            row_grad = chunk_grad[slots[rows]]
            centre = all_reduce_sum((probs * row_grad).sum(dim=-1, keepdim=True), group)
            # tau^2 of the loss over the tau that divides the logits.
            probs.mul_(row_grad.sub_(centre)).mul_(grad_loss * temperature)
            out[rows] = probs.masked_fill_(unused[rows], 0.0)
        return out, None, None, None, None, None, None


def _compare(
    p: torch.Tensor, projected: torch.Tensor, mass: torch.Tensor, direction: KLDirection
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's columns of dKL_c/dQ~_c [C, Vpt], and its share of KL_c [C] and the entropy [C].

    The reverse gradient still lacks its constant ``-KL_c / mass``, which needs every column.
    """
    floor = _floor(p)
    floored = projected.clamp(min=floor)
    log_p = p.clamp(min=floor).log_()
    entropy = -(p * log_p).sum(dim=-1)
    log_ratio = floored.log().sub_(mass.log()).sub_(log_p)
    if direction == "forward":
        kl = -(p * log_ratio).sum(dim=-1)
        return mass.reciprocal() - p / floored, kl, entropy
    kl = (projected / mass * log_ratio).sum(dim=-1)
    return log_ratio.div_(mass), kl, entropy


def _floor(like: torch.Tensor) -> float:
    """What probabilities are clamped at before a logarithm or a division.

    A column whose Q~ underflows (some 80 nats below the student's largest logit) costs
    ``p * -log(floor)`` instead of infinity. Its gradient is ``-p / floor`` times probabilities
    below the floor, so it fades to zero with Q~ instead of turning into NaN. 1024 times the
    smallest normal number keeps ``log(floor) / floor`` finite and clear of flushed denormals.
    """
    return 1024 * torch.finfo(like.dtype).tiny


def _onto_student(
    grad: torch.Tensor, weight: torch.Tensor, group: ProcessGroup | None, sizes: torch.Tensor
) -> torch.Tensor:
    """dL/dq_i of a row in each slot, [C + 1, Vps]: one all-gather a slice of chunks."""
    student_width, teacher_vocab = weight.shape
    onto_student = weight.to(grad.dtype).t()
    out = grad.new_zeros(grad.shape[0] + 1, student_width)
    for rows in row_slices(grad.shape[0], grad.shape[1] * group_size(group), device=grad.device):
        out[rows] = gather_columns(grad[rows], group)[:, :teacher_vocab] @ onto_student
    return out.div_(sizes[:, None])

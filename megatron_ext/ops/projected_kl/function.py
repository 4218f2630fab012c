"""Projected KL over vocabulary shards, gradient by hand. T rows, Vp local columns, C chunks.

Equations and memory are in the README; ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.projected_kl.comparison import (
    compare,
    kept_threshold,
    pool_rest,
    probability_floor,
)
from megatron_ext.ops.projected_kl.learned_entries import LearnedEntries, entry_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ProjectedKL(NamedTuple):
    """What is known of each chunk [C], replicated over the group; ``chunk_loss`` has a graph."""

    chunk_loss: torch.Tensor
    """tau^2 D_c."""

    teacher_entropy: torch.Tensor
    """Entropy of P_c in nats."""

    top1_agreement: torch.Tensor
    """bool: Q_c and P_c have the same largest column."""

    offsupport_mass: torch.Tensor
    """Teacher mass on columns the projection cannot reach, summed over the chunk's rows."""

    teacher_rows: torch.Tensor
    """int64: teacher rows in the chunk."""

    rest_mass: torch.Tensor
    """Mass of P_c outside the top ``vocab_topk`` columns; 0 without the option."""


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
    direction: Divergence = "forward",
    mixture: float = 0.5,
    vocab_topk: int | None = None,
    learned: LearnedEntries | None = None,
) -> ProjectedKL:
    """``tau^2 * D(P_c || Q_c)`` of each chunk; D as in ``ops/divergence``.

    Args:
        student_logits: [Ts, Vps], any float dtype; has a gradient.
        teacher_logits: [Tt, Vpt], any float dtype.
        student_chunk_id: int64 [Ts], negative for rows of no chunk.
        teacher_chunk_id: int64 [Tt].
        weight: CSR [Vps, Vt], this rank's rows of the projection and all its columns.
        weight_transposed: CSR [Vt, Vps], the same entries.
        row_mass: [Vps], sum of each row of ``weight``.
        reachable: bool [Vpt], this rank's teacher columns with an entry in any rank's ``weight``.
        mixture: Weight of P_c in the mixture of ``jensen_shannon``.
        vocab_topk: Compare on so many columns a chunk, those of the largest teacher mass, and on
            the rest as one; of equals at the end all are kept. None: on every column.
        learned: Entries of ``weight`` that have a gradient as well, as if each were free.

    A chunk whose ``chunk_loss`` gets no gradient gives none to its rows, whatever they hold.
    Everything is accumulated in fp32 (fp64 for fp64 logits). Collectives on the shards' group,
    equally many on every rank and independent of the data: forward 2 all-reduces of [Ts + 2 Tt], 4
    of [C] to [3, C] and one reduce-scatter of [C', Vt] a slice of C' chunks; backward one
    all-gather a slice of chunks and one all-reduce of [T'] a slice of student rows. ``vocab_topk``
    adds to the forward one all-gather of [C, vocab_topk] and one all-reduce of [2, C'] a slice.
    """
    student = _Side.build(student_logits, student_chunk_id, chunk_count, student_shard)
    teacher = _Side.build(teacher_logits, teacher_chunk_id, chunk_count, teacher_shard)
    unreached = teacher_shard.excluded_columns(teacher_logits.device, reachable)
    lse, *teacher_lse = _log_sum_exps(student, teacher, unreached, temperature)
    teacher_probs, offsupport_mass = _teacher_chunks(teacher, teacher_lse, unreached, temperature)
    threshold = None
    if vocab_topk is not None:
        group = teacher_shard.group
        threshold = kept_threshold(teacher_probs, vocab_topk, teacher_shard.vocab_size, group)
    chunk_loss, entropy, agreement, rest_mass = _ProjectedKL.apply(
        student_logits,
        student,
        lse,
        teacher_probs,
        threshold,
        teacher_shard,
        (weight, weight_transposed, row_mass),
        temperature,
        direction,
        mixture,
        *(learned or (None, None, None)),
    )
    teacher_rows = torch.zeros_like(teacher.sizes, dtype=torch.int64)
    teacher_rows.index_add_(0, teacher.slots, torch.ones_like(teacher.slots))
    return ProjectedKL(
        chunk_loss, entropy, agreement, offsupport_mass, teacher_rows[:-1], rest_mass
    )


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


def _log_sum_exps(
    student: _Side, teacher: _Side, unreached: torch.Tensor | None, temperature: float
) -> list[LogSumExp]:
    """Of the student [Ts], and of the teacher [Tt] over all columns and over those reached.

    Two all-reduces.
    """
    local = [
        local_log_sum_exp(side.logits, temperature, excluded)
        for side, excluded in (
            (student, student.excluded),
            (teacher, teacher.excluded),
            (teacher, unreached),
        )
    ]
    peaks, totals = (torch.cat(parts) for parts in zip(*local, strict=True))
    merged = merge_log_sum_exp(peaks, totals, student.shard.group)
    rows = [len(peak) for peak, _ in local]
    return [LogSumExp(*parts) for parts in zip(*(x.split(rows) for x in merged), strict=True)]


@torch.no_grad()
def _teacher_chunks(
    teacher: _Side, lse: list[LogSumExp], unreached: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """P_c [C, Vpt] over the reachable columns, and the mass they leave out. No collectives."""
    whole, reached = lse
    left_out = -torch.expm1((reached.peak - whole.peak).add_(reached.log_sum).sub_(whole.log_sum))
    left_out = left_out.to(teacher.sizes.dtype)
    offsupport = torch.zeros_like(teacher.sizes).index_add_(0, teacher.slots, left_out)
    return teacher.chunk_means(reached, temperature, unreached), offsupport[:-1]


class _ProjectedKL(torch.autograd.Function):
    """Keeps the student's logits, their lse [Ts] and dD_c/dQ~_c [C, Vpt] for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        student_logits: torch.Tensor,
        student: _Side,
        lse: LogSumExp,
        teacher_probs: torch.Tensor,
        threshold: torch.Tensor | None,
        teacher_shard: VocabShard,
        projection: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        temperature: float,
        direction: Divergence,
        mixture: float,
        entry_value: torch.Tensor | None,
        entry_row: torch.Tensor | None,
        entry_column: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weight, weight_transposed, row_mass = projection
        group = student.shard.group
        means = student.chunk_means(lse, temperature, student.excluded)
        # The projection follows the logits: fp64 in a gradient check, else fp32.
        onto_teacher = weight_transposed.to(means.dtype).t()
        mass = all_reduce_sum(means @ row_mass.to(means.dtype), group)
        mass.clamp_(min=probability_floor(means))

        grad = torch.empty_like(teacher_probs, dtype=means.dtype)
        # Value, centre and entropy; this rank's columns, and what is pooled on all ranks alike.
        sums, pooled = means.new_zeros(2, 3, mass.shape[0])
        rest_mass = means.new_zeros(mass.shape[0])
        best, column = means.new_zeros(2, mass.shape[0]), torch.zeros_like(sums[:2]).long()
        onto_width = teacher_shard.width * group_size(group)
        for rows in row_slices(mass.shape[0], onto_width, device=mass.device):
            q = sum_columns(means[rows] @ onto_teacher, teacher_shard.width, group)
            p = teacher_probs[rows].to(q.dtype)
            for side, values in enumerate((p, q)):
                best[side, rows], column[side, rows] = local_argmax(values, teacher_shard)
            sums[2, rows] = -(p * p.clamp(min=probability_floor(p)).log_()).sum(dim=-1)
            rest = None
            if threshold is not None:
                rest = p < threshold[rows, None]
                p, q, masses = pool_rest(p, q, rest, group)
                at_rest = compare(
                    masses[0, :, None], masses[1, :, None], mass[rows, None], direction, mixture
                )
                pooled[0, rows], pooled[1, rows] = at_rest.value[:, 0], at_rest.centre[:, 0]
                rest_mass[rows] = masses[0]
            parts = compare(p, q, mass[rows, None], direction, mixture)
            grad[rows] = parts.slope
            for index, terms in enumerate((parts.value, parts.centre)):
                kept = terms if rest is None else terms.masked_fill(rest, 0.0)
                sums[index, rows] = kept.sum(dim=-1)

        value, centre, entropy = all_reduce_sum(sums, group).add_(pooled)
        if direction == "forward":
            # What it is but for rounding and for columns below the floor.
            centre = torch.full_like(centre, -1.0)
        grad.sub_(centre[:, None]).div_(mass[:, None])
        p_top, q_top = merge_argmax(best, column, group)

        ctx.save_for_backward(
            student_logits, *lse, student.slots, student.sizes, grad, entry_row, entry_column
        )
        ctx.student, ctx.weight, ctx.temperature = student.shard, weight, temperature
        outputs = (temperature**2 * value, entropy, p_top == q_top, rest_mass)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        logits, peak, log_sum, slots, sizes, slope, entry_row, entry_column = ctx.saved_tensors
        lse = LogSumExp(peak, log_sum)
        group, temperature = ctx.student.group, ctx.temperature
        excluded = ctx.student.excluded_columns(logits.device)
        entries = None
        if entry_row is not None and ctx.needs_input_grad[10]:
            means = chunk_mean_softmax(
                logits, lse, slots, sizes, temperature=temperature, excluded=excluded
            )
            entries = (means, grad_loss * temperature**2, entry_row, entry_column)
        chunk_grad, entry_grad = _onto_student(slope, ctx.weight, group, sizes, entries)
        # tau^2 of the loss over the tau that divides the logits; 0 for rows of no chunk.
        scale = torch.nn.functional.pad(grad_loss * temperature, (0, 1))[slots][:, None]
        out = torch.empty_like(logits)
        for rows in row_slices(*logits.shape, device=logits.device):
            scaled = scaled_logits(logits[rows], temperature, excluded)
            probs = lse.normalise_(scaled, rows).exp_()
            row_grad = chunk_grad[slots[rows]]
            centre = all_reduce_sum((probs * row_grad).sum(dim=-1, keepdim=True), group)
            probs.mul_(row_grad.sub_(centre)).mul_(scale[rows])
            out[rows] = probs.masked_fill_(scale[rows] == 0, 0.0)
        return out, *[None] * 9, entry_grad, None, None


def _onto_student(
    slope: torch.Tensor,
    weight: torch.Tensor,
    group: ProcessGroup | None,
    sizes: torch.Tensor,
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dD/dq_i of a row in each slot, [C + 1, Vps], and the gradient of learned entries.

    One all-gather a slice of chunks.

    Args:
        entries: The student's chunk means [C, Vps], their weights [C], rows and columns of entries.
    """
    student_width, teacher_vocab = weight.shape
    onto_student = weight.to(slope.dtype).t()
    out = slope.new_zeros(slope.shape[0] + 1, student_width)
    entry_grad = None if entries is None else slope.new_zeros(len(entries[2]))
    for rows in row_slices(slope.shape[0], slope.shape[1] * group_size(group), device=slope.device):
        everywhere = gather_columns(slope[rows], group)[:, :teacher_vocab]
        out[rows] = everywhere @ onto_student
        if entries is not None and entry_grad is not None:
            means, scale, row, column = entries
            entry_grad += entry_gradient(means[rows], everywhere, scale[rows], row, column)
    return out.div_(sizes[:, None]), entry_grad

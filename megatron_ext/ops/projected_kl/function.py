"""Projected KL over vocabulary shards, gradient by hand. T rows, Vp local columns, C chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.projected_kl.column_plan import ColumnPlan
from megatron_ext.ops.projected_kl.evaluation import evaluate_projected_kl
from megatron_ext.ops.projected_kl.learned_entries import LearnedEntries
from megatron_ext.ops.projected_kl.sharded_projection import ShardedProjection
from megatron_ext.ops.projected_kl.values import Comparing, ProjectedKL
from megatron_ext.ops.unit_gradient import kept_gradient


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
    plan: ColumnPlan | None = None,
    temperature: float = 1.0,
    direction: Divergence = "forward",
    mixture: float = 0.5,
    vocab_topk: int | None = None,
    learned: LearnedEntries | None = None,
    announced: torch.Tensor | None = None,
    in_place: bool = False,
    diagnostics: bool = True,
    implementation: Implementation = "auto",
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
        plan: How kernels walk the entries; without one torch does.
        mixture: Weight of P_c in the mixture of ``jensen_shannon``.
        vocab_topk: Compare on so many columns a chunk, those of the largest teacher mass, and on
            the rest as one; of equals at the end all are kept. None: on every column.
        learned: Entries of ``weight`` that have a gradient as well, as if each were free.
        announced: fp32 [C], the gradient that each chunk's loss is going to get; None: 1. It is
            written in the forward, and another one costs a pass. A chunk announced 0 has no
            gradient, whatever it gets.
        in_place: Overwrite the student's logits with their gradient.
        diagnostics: Whether to say ``teacher_entropy`` and ``top1_agreement``.

    A chunk whose ``chunk_loss`` gets no gradient gives none to its rows, whatever they hold.
    Collectives: those of ``evaluate_projected_kl`` in the forward, none in the backward; with
    ``learned`` entries that have a graph they are in both.

    Raises:
        LossError: ``triton`` was asked for and cannot run, or ``in_place`` together with
            ``learned`` entries, whose gradient reads the logits in the backward.
    """
    rows = ChunkRows.of(student_chunk_id, chunk_count)
    evaluate = partial(
        evaluate_projected_kl,
        teacher_logits=teacher_logits,
        student_rows=rows,
        teacher_rows=ChunkRows.of(teacher_chunk_id, chunk_count),
        projection=ShardedProjection(weight, weight_transposed, row_mass, reachable, plan),
        student_shard=student_shard,
        teacher_shard=teacher_shard,
        comparing=Comparing(temperature, direction, mixture, vocab_topk, diagnostics),
        implementation=implementation,
    )
    if learned is not None and learned.value.requires_grad and torch.is_grad_enabled():
        if in_place:
            raise LossError(
                "projected_kl cannot overwrite logits that learned entries read in the backward",
                fix="leave out in_place",
            )
        return ProjectedKL(*_WithLearned.apply(student_logits, evaluate, *learned))
    values = kept_gradient(
        student_logits,
        lambda logits, gradient: evaluate(logits, gradient=gradient, announced=announced),
        grad_scale=announced,
        slots=rows.slots,
        in_place=in_place,
        implementation=implementation,
    )
    return ProjectedKL(*values)


class _WithLearned(torch.autograd.Function):
    """Evaluates again in the backward: what an entry gets is a sum over chunks by their weights."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        evaluate: partial[ProjectedKL],
        value: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        out = evaluate(logits)
        ctx.save_for_backward(logits, value, row, column)
        ctx.evaluate = evaluate
        ctx.mark_non_differentiable(*(x for x in out[1:] if x is not None))
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        logits, *learned = ctx.saved_tensors
        entry_gradient = torch.zeros_like(learned[0], dtype=grad_loss.dtype)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        ctx.evaluate(
            logits,
            announced=grad_loss,
            gradient=gradient,
            learned=LearnedEntries(*learned),
            entry_gradient=entry_gradient,
        )
        return gradient, None, entry_gradient.to(learned[0].dtype), None, None

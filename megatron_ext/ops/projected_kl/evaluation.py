"""Values and gradients of the projected KL, without a graph. T rows, Vp local columns, C chunks.

Equations and memory are in the README; ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

import torch

from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.launch import Implementation, check_implementation, uses_triton
from megatron_ext.ops.projected_kl.kernel_evaluation import KernelEvaluation, sum_over_rows
from megatron_ext.ops.projected_kl.operands import (
    LearnedEntries,
    ProjectedKL,
    ProjectedKLOptions,
    RequestedOutputs,
    ShardedProjection,
    WeightedLabels,
)
from megatron_ext.ops.projected_kl.statistics import chunk_statistics, label_columns, token_losses
from megatron_ext.ops.projected_kl.torch_evaluation import TorchEvaluation


@torch.no_grad()
def evaluate_projected_kl(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    projection: ShardedProjection,
    options: ProjectedKLOptions,
    *,
    grad_scale: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    cross_entropy: WeightedLabels | None = None,
    learned: LearnedEntries | None = None,
    entry_gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> ProjectedKL:
    """``tau^2 D(P_c || Q_c)`` of each chunk, and what the student's logits get from them.

    Args:
        grad_scale: fp32 [C], the gradient that each chunk's loss will get; None: 1.
        gradient: [Ts, Vps] in the student's dtype, which receives the gradient of ``sum_c
            grad_scale_c chunk_loss_c + sum_i weight_i token_loss_i``, rounded once; it may be
            the logits themselves. Rows of no chunk and of chunks of scale 0 get exactly 0 from
            the chunks whatever they hold, and so do those of a chunk in which a teacher row masks
            every reachable column, or every student row all that the projection carries over: its
            loss is 0. None: nothing is computed for it.
        entry_gradient: [N], to which the gradient of the ``learned`` entries is added.

    Everything is accumulated in fp32 (fp64 for fp64 logits). No tensor over a vocabulary of more
    rows than a slice of whole chunks has (``distributed/vocab_parallel.py``). In torch the host
    waits for the device once.

    Collectives on the shards' group, equally many on every rank: 2 all-reduces of [2 Ts + 2 Tt],
    one of [Ts] unless the projection is known to have unit rows, one of [Ts] for the
    cross-entropy. In torch a slice of C' chunks with T' student rows adds a reduce-scatter of
    [C', Vt] and an all-reduce of [3, C'], two of [2, C'] for diagnostics, with ``vocab_topk`` one
    of [2, C'] and an all-gather of [C', vocab_topk], and for gradients an all-gather of [C', Vt]
    and an all-reduce of [T'].

    Raises:
        LossError: ``triton`` was asked for and cannot run.
    """
    check_implementation("projected_kl", implementation)
    student = student._replace(logits=student.logits.detach())
    teacher = teacher._replace(logits=teacher.logits.detach())
    by_kernels = _runs_kernels(implementation, options, projection, student.logits, teacher.logits)
    statistics = chunk_statistics(
        student,
        teacher,
        projection,
        temperature=options.temperature,
        untempered=cross_entropy is not None,
        implementation=implementation if by_kernels else "torch",
    )
    token_loss = None
    if cross_entropy is not None:
        assert statistics.untempered is not None
        column = label_columns(cross_entropy.label, student.shard)
        token_loss = token_losses(
            student.logits, column, cross_entropy.label, statistics.untempered, student.shard
        )
    compared = (student.rows.sizes() > 0) & (teacher.rows.sizes() > 0)
    # A teacher that masks all that the projection reaches says nothing about it.
    says_nothing = (statistics.teacher.log_sum == -torch.inf) & (statistics.left_out == 1)
    compared &= teacher.rows.sums(says_nothing.to(statistics.left_out.dtype)) == 0
    # Nor does a student that masks all that it maps.
    compared &= ~statistics.carried.is_empty
    weights = statistics.mapped.new_ones(len(compared)) if grad_scale is None else grad_scale
    requested = RequestedOutputs(
        gradient,
        torch.where(compared, weights.to(statistics.mapped.dtype), 0.0),
        cross_entropy,
        learned,
        entry_gradient,
    )
    by = KernelEvaluation if by_kernels else TorchEvaluation
    values = by(student, teacher, projection, statistics, options, requested).run()
    left_out, rows = statistics.left_out, teacher.rows
    offsupport_mass = sum_over_rows(left_out, rows) if by_kernels else rows.sums(left_out)
    return ProjectedKL(
        torch.where(compared, options.temperature**2 * values.value, 0.0),
        torch.where(compared, values.entropy, 0.0),
        values.agreement & compared,
        offsupport_mass,
        teacher.rows.sizes().long(),
        values.rest_mass,
        token_loss,
    )


def _runs_kernels(
    implementation: Implementation,
    options: ProjectedKLOptions,
    projection: ShardedProjection,
    *logits: torch.Tensor,
) -> bool:
    """Raise LossError where ``triton`` was asked for and cannot be had."""
    asked = implementation == "triton"
    if options.vocab_topk is not None:
        if asked:
            raise LossError(
                "the kernels of projected_kl compare on every column",
                got=f"vocab_topk {options.vocab_topk}",
                fix="leave out vocab_topk, or take implementation 'auto' or 'torch'",
            )
        return False
    if projection.plan is None:
        if asked:
            raise LossError(
                "the kernels of projected_kl need a plan of the projection",
                fix="pass the plan of a ProjectionShard, or take implementation 'auto' or 'torch'",
            )
        return False
    return uses_triton(implementation, *logits)

"""Projected KL over vocabulary shards: value, gradient by hand, and dense reference.

T rows, V columns, Vp local columns, C chunks. Equations and memory are in the README.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import accumulation_dtype
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.divergence import divergence_reference
from megatron_ext.ops.launch import (
    Implementation,
    check_implementation,
    uses_compiled,
    uses_triton,
)
from megatron_ext.ops.model_rows import chunk_mean_softmax_reference
from megatron_ext.ops.projected_kl.kernel_evaluation import KernelEvaluation
from megatron_ext.ops.projected_kl.kernel_numbers import KernelNumbers
from megatron_ext.ops.projected_kl.operands import (
    LearnedEntries,
    ProjectedKL,
    ProjectedKLOptions,
    RequestedOutputs,
    ShardedProjection,
    WeightedLabels,
)
from megatron_ext.ops.projected_kl.statistics import (
    chunk_statistics,
    label_logits,
    merged_sums,
    token_losses,
)
from megatron_ext.ops.projected_kl.torch_evaluation import TorchEvaluation
from megatron_ext.ops.unit_gradient import kept_gradient

if TYPE_CHECKING:
    from megatron_ext.ops.projected_kl.compiled_evaluation import CompiledEvaluation


@torch.no_grad()
def evaluate_projected_kl(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    projection: ShardedProjection,
    options: ProjectedKLOptions,
    *,
    grad_scale: torch.Tensor | float = 1.0,
    gradient: torch.Tensor | None = None,
    cross_entropy: WeightedLabels | None = None,
    learned: LearnedEntries | None = None,
    entry_gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> ProjectedKL:
    """``tau^2 D(P_c || Q_c)`` of each chunk, and the gradient of the student's logits.

    Args:
        grad_scale: fp32 [C], the upstream gradient of each chunk's loss, or that of all.
        gradient: [Ts, Vps] in the student's dtype, which receives the gradient of ``sum_c
            grad_scale_c chunk_loss_c + sum_i weight_i token_loss_i``, rounded once; it may be
            the logits themselves. Rows of no chunk and of chunks of scale 0 get exactly 0 from
            the chunks whatever they hold, and so do those of a chunk of loss 0, in which a teacher
            row masks every reachable column, or every student row all mapped columns. None: no
            gradient is computed.
        entry_gradient: [N], to which the gradient of the ``learned`` entries is added.

    Everything is accumulated in fp32 (fp64 for fp64 logits). No tensor over a vocabulary
    has more rows than a slice of whole chunks (``distributed/vocab_parallel.py``). In torch the
    host waits for the device once.

    Collectives on the shards' group, equally many on every rank: 2 all-reduces of [2 Ts + 2 Tt],
    one of [Ts] unless the projection is known to have unit rows, one of [Ts] for the
    cross-entropy. In torch a slice of C' chunks with T' student rows adds a reduce-scatter of
    [C', Vt] and an all-reduce of [3, C'], two of [2, C'] for diagnostics, with ``vocab_topk`` one
    of [2, C'] and an all-gather of [C', vocab_topk], and for gradients an all-gather of [C', Vt]
    and an all-reduce of [T']. By kernels and loops ``vocab_topk`` adds an all-gather of
    [C', vocab_topk] a slice, and an all-reduce of [2, C'] a tile.

    Raises:
        LossError: ``triton`` or ``cpu`` was asked for and cannot run.
    """
    check_implementation("projected_kl", implementation)
    student = student._replace(logits=student.logits.detach())
    teacher = teacher._replace(logits=teacher.logits.detach())
    has_plan = projection.plan is not None
    if implementation in ("triton", "cpu") and not has_plan:
        raise LossError(
            "kernels and compiled loops of projected_kl need a plan of the projection",
            fix="pass the plan of a ProjectionShard, or take implementation 'auto' or 'torch'",
        )
    logits = student.logits, teacher.logits
    by_kernels = has_plan and uses_triton(implementation, *logits)
    by_loops = has_plan and not by_kernels and uses_compiled(implementation, *logits)
    sums = merged_sums(
        student,
        teacher,
        projection,
        temperature=options.temperature,
        untempered=cross_entropy is not None,
        implementation="triton" if by_kernels else "cpu" if by_loops else "torch",
    )
    if by_kernels:
        numbers = KernelNumbers.of(
            sums, student, teacher, projection, cross_entropy, grad_scale, options.temperature
        )
        weights = numbers.grad_scale
    elif isinstance(grad_scale, torch.Tensor):
        weights = grad_scale.to(accumulation_dtype(student.logits.dtype))
    else:
        dtype = accumulation_dtype(student.logits.dtype)
        weights = student.logits.new_full((student.rows.chunk_count,), grad_scale, dtype=dtype)
    requested = RequestedOutputs(gradient, weights, cross_entropy, learned, entry_gradient)
    if by_kernels:
        values = KernelEvaluation(student, teacher, projection, numbers, options, requested).run()
        return ProjectedKL(
            values.value,
            values.entropy,
            values.agreement,
            numbers.left_out,
            values.rest_mass,
            numbers.token_loss,
            sums.top_column,
            sums.log_sum[: len(student.logits)],
        )
    statistics = chunk_statistics(
        sums,
        student,
        projection,
        temperature=options.temperature,
        untempered=cross_entropy is not None,
    )
    token_loss = None
    if cross_entropy is not None:
        assert statistics.untempered is not None
        label = cross_entropy.label
        picked = label_logits(student.logits, label, student.shard)
        token_loss = token_losses(picked, label, statistics.untempered, student.shard)
    compared = (student.rows.sizes() > 0) & (teacher.rows.sizes() > 0)
    # A teacher row that masks every reachable column gives no distribution over them.
    says_nothing = (statistics.teacher.log_sum == -torch.inf) & (statistics.left_out == 1)
    compared &= teacher.rows.sums(says_nothing.to(statistics.left_out.dtype)) == 0
    # Nor do student rows that mask all mapped columns.
    compared &= ~statistics.carried.is_empty
    requested = requested._replace(grad_scale=torch.where(compared, weights, 0.0))
    by: type[TorchEvaluation | CompiledEvaluation] = TorchEvaluation
    if by_loops:
        from megatron_ext.ops.projected_kl.compiled_evaluation import CompiledEvaluation

        by = CompiledEvaluation
    values = by(student, teacher, projection, statistics, options, requested).run()
    return ProjectedKL(
        torch.where(compared, options.temperature**2 * values.value, 0.0),
        torch.where(compared, values.entropy, 0.0),
        values.agreement & compared,
        teacher.rows.sums(statistics.left_out),
        values.rest_mass,
        token_loss,
        statistics.top_column,
        statistics.student.log_sum,
    )


def projected_kl(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    projection: ShardedProjection,
    options: ProjectedKLOptions,
    *,
    learned: LearnedEntries | None = None,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> ProjectedKL:
    """``tau^2 * D(P_c || Q_c)`` of each chunk; D as in ``ops/divergence``.

    Args:
        student: Its logits have a gradient.
        projection: Without a plan, torch evaluates it.
        learned: Entries of the projection that get a gradient as well, independent of one another.
        grad_scale: fp32 [C], the upstream gradient that each chunk's loss will get; None: 1. The
            forward writes the gradient for it; another one costs a pass. A chunk of scale 0 never
            gets a gradient.
        in_place: Overwrite the student's logits with their gradient.

    A chunk whose ``chunk_loss`` gets no gradient passes none on to its rows, whatever they hold.
    Collectives: those of ``evaluate_projected_kl`` in the forward, none in the backward; with
    ``learned`` entries that have a graph they are in both.

    Raises:
        LossError: ``triton`` was asked for and cannot run, or ``in_place`` together with
            ``learned`` entries, whose gradient reads the logits in the backward.
    """

    def evaluate(logits: torch.Tensor, **outputs: Any) -> ProjectedKL:
        return evaluate_projected_kl(
            student._replace(logits=logits),
            teacher,
            projection,
            options,
            implementation=implementation,
            **outputs,
        )

    if learned is not None and learned.value.requires_grad and torch.is_grad_enabled():
        if in_place:
            raise LossError(
                "projected_kl cannot overwrite logits that learned entries read in the backward",
                fix="leave out in_place",
            )
        return ProjectedKL(*_WithLearned.apply(student.logits, evaluate, *learned))
    values = kept_gradient(
        student.logits,
        lambda logits, gradient: evaluate(
            logits, gradient=gradient, grad_scale=1.0 if grad_scale is None else grad_scale
        ),
        grad_scale=grad_scale,
        slots=student.rows.chunk_id,
        in_place=in_place,
        implementation=implementation,
    )
    return ProjectedKL(*values)


class _WithLearned(torch.autograd.Function):
    """Evaluates again in the backward: an entry's gradient is a sum over chunks by their
    weights."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        evaluate: Callable[..., ProjectedKL],
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
            grad_scale=grad_loss,
            gradient=gradient,
            learned=LearnedEntries(*learned),
            entry_gradient=entry_gradient,
        )
        return gradient, None, entry_gradient.to(learned[0].dtype), None, None


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
    """``tau^2 D_c`` of each chunk [C], dense and unsharded (README, equations 1 to 5).

    Differentiable by autograd, in fp64 for fp64 inputs; the operation is tested against it.

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

    Q_c does not depend on the constant, and mapped columns do not underflow beside the others.
    """
    log_q = torch.log_softmax(scaled, dim=-1)
    log_q = log_q.masked_fill(~(projection > 0).any(dim=1), -torch.inf)
    means = []
    for chunk in range(chunk_count):
        rows = log_q[chunk_id == chunk]
        means.append((rows - rows.detach().max()).exp().mean(dim=0))
    return torch.stack(means) if means else log_q[:0]


def _pooled(p: torch.Tensor, q: torch.Tensor, vocab_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on the columns of each chunk's largest ``p``, with the rest as one column."""
    columns = p.topk(vocab_topk, dim=-1).indices
    sides = []
    for side in (p, q):
        largest = side.gather(-1, columns)
        rest = side.scatter(-1, columns, 0.0).sum(dim=-1, keepdim=True)
        sides.append(torch.cat([largest, rest], dim=-1))
    return sides[0], sides[1]

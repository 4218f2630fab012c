"""Divergence of two models over one sharded vocabulary: value, gradient and dense reference.

T rows, V columns, Vp local columns. Equations and memory are in the README.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, accumulation_dtype
from megatron_ext.ops.chunk_rows import ExpSums, merge_exp_sums, merge_top_columns
from megatron_ext.ops.divergence import FORWARD_KL, DivergenceOptions, divergence_reference
from megatron_ext.ops.labels import LabelTerm, label_losses, label_rows
from megatron_ext.ops.launch import Implementation, check_implementation, uses_compiled, uses_triton
from megatron_ext.ops.unit_gradient import kept_gradient
from megatron_ext.ops.vocab_kl.pair_evaluation import PairEvaluation, pair_statistics


class VocabKLValues(NamedTuple):
    """Values of each row [T], replicated over the group; 0 where the row is not read."""

    row_loss: torch.Tensor
    """tau^2 D."""

    teacher_entropy: torch.Tensor
    """Entropy of the teacher in nats, at tau."""

    top1_agreement: torch.Tensor
    """bool: True where both have the same largest column."""

    cross_entropy: torch.Tensor | None
    """-log p(label) at temperature 1, 0 where there is no label; None without labels."""

    top_column: torch.Tensor
    """int64: global column of the student's largest logit, the first of equals."""

    student_log_sum: torch.Tensor
    """Logarithm of the student's sum at tau, NaN where its row has NaN or +inf; -inf where the row
    is not read."""

    teacher_log_sum: torch.Tensor


def evaluate_vocab_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    options: DivergenceOptions = FORWARD_KL,
    labels: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    label_grad_scale: torch.Tensor | float = 1.0,
    gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> VocabKLValues:
    """Compute ``tau^2 D`` of each row, and write the gradient into the caller's memory.

    Args:
        student_logits: [T, Vp], any float dtype, contiguous in its columns.
        teacher_logits: [T, Vpt], likewise.
        teacher_shard: The student's real columns; padding can differ.
        labels: int64 [T] global, negative for none, of the cross-entropy; None: it is not computed.
        grad_scale: [T], the upstream gradient of each ``row_loss``; None: 1.
        label_grad_scale: [T], that of each ``cross_entropy``, or that of all. A row at 0 in both,
            or at 0 and without a label, is not read.
        gradient: [T, Vp] of the student's dtype, or the student's logits themselves; receives the
            gradient of ``grad_scale . row_loss + label_grad_scale . cross_entropy``, and exactly 0
            in rows that are not read and in padding.

    Collectives: two all-reduces of [3 T] ([5 T] with labels, or [4 T] at temperature 1), one of
    [2 T] int64, one of [3 T]. Bytes of a row by kernel, of V logits of b bytes: 2 b V for the
    statistics, 2 b V for the values and b V for a gradient written in the same pass; the reverse
    KL and the Jensen-Shannon divergence need a sum over the row first, and 2 b V more for it.
    """
    temperature = options.temperature
    by: Implementation = "torch"
    if uses_triton(implementation, student_logits, teacher_logits):
        by = "triton"
    elif uses_compiled(implementation, student_logits, teacher_logits):
        by = "cpu"
    width = student_shard.valid_width
    student, teacher = student_logits.detach()[:, :width], teacher_logits.detach()[:, :width]
    held_width = min(student_logits.shape[1], teacher_logits.shape[1])
    dtype = accumulation_dtype(student_logits.dtype)
    lookup, token_sums = None, _token_sums(student_logits)
    if labels is not None:
        lookup = label_rows(
            student_logits, labels, student_shard, label_grad_scale, token_sums, implementation=by
        )
    if grad_scale is None:
        weight, read = student_logits.new_ones(len(student_logits), dtype=dtype), None
    else:
        weight, read = grad_scale.to(dtype), grad_scale != 0
        if lookup is not None:
            read |= lookup.read
    with_plain = labels is not None and temperature != 1.0
    local = pair_statistics(
        student,
        teacher,
        temperature=temperature,
        with_plain=with_plain,
        read=read,
        held_width=held_width,
        by=by,
    )
    sums = [local.student, local.teacher, local.shared]
    if labels is not None:
        sums += [token_sums] if local.plain is None else [token_sums, local.plain]
    own, other, shared, *labelled = merge_exp_sums(sums, student_shard)
    tops = merge_top_columns(local.columns, sums[:2], [own, other], [student_shard, teacher_shard])
    agreement = tops[0] == tops[1]

    term = cross_entropy = None
    if labels is not None and lookup is not None:
        plain = LogSumExp(*(labelled[1] if with_plain else own))
        cross_entropy = label_losses(
            LogSumExp(*labelled[0]), plain, labels, lookup.read, student_shard, implementation=by
        )
        term = LabelTerm(labels, lookup.column, lookup.weight, plain)
    pair = PairEvaluation(student, teacher, own, other, weight, term, options, held_width)
    # The teacher's mass where the student has mass: minus the sum of the forward KL's slopes.
    centre = -torch.exp((shared.peak - other.peak) + (shared.log_sum - other.log_sum))
    at_once = gradient if options.direction == "forward" else None
    terms = pair.run(centre=centre, gradient=at_once, by=by)
    value, slope, entropy = all_reduce_sum(terms, student_shard.group)
    if gradient is not None and at_once is None:
        pair.run(centre=slope, gradient=gradient, with_sums=False, by=by)
    log_sums = own.log_sum, other.log_sum
    compared = temperature**2 * value, entropy, agreement
    if read is not None:
        unread = ~read
        compared = (
            compared[0].masked_fill_(unread, 0.0),
            *(part.masked_fill(unread, 0) for part in compared[1:]),
        )
    return VocabKLValues(*compared, cross_entropy, tops[0], *log_sums)


def _token_sums(logits: torch.Tensor) -> ExpSums:
    """Memory for the logits of labels."""
    dtype = accumulation_dtype(logits.dtype)
    return ExpSums(*(logits.new_empty(len(logits), dtype=dtype) for _ in range(2)))


def vocab_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    options: DivergenceOptions = FORWARD_KL,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> VocabKLValues:
    """``tau^2 * D(softmax(y / tau) || softmax(z / tau))`` of each row; D as in ``ops/divergence``.

    Args:
        student_logits: [T, Vp] z, any float dtype; the only argument with a gradient.
        teacher_logits: [T, Vpt] y, any float dtype.
        student_shard: This rank's columns.
        teacher_shard: The same real columns; padding can differ.
        grad_scale: [T], the gradient that each ``row_loss`` will get; None: 1. Another
            upstream gradient costs a pass over the gradient. But a row of scale 0 is not read: all
            its values are 0, and it never gets a gradient.
        in_place: Overwrite the student's logits with their gradient, if they need one.

    A row whose ``row_loss`` gets no gradient passes none on, whatever it holds. Everything is
    accumulated in fp32 (fp64 for fp64 logits of the student). Collectives: forward four all-reduces
    (``evaluate_vocab_kl``), backward none. Keeps the gradient, in the logits' dtype, and no logits.

    Raises:
        LossError: The implementation is unknown or cannot run here.
    """
    check_implementation("vocab_kl", implementation)

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> VocabKLValues:
        return evaluate_vocab_kl(
            logits,
            teacher_logits,
            student_shard=student_shard,
            teacher_shard=teacher_shard,
            options=options,
            grad_scale=grad_scale,
            gradient=gradient,
            implementation=implementation,
        )

    values = kept_gradient(
        student_logits,
        evaluate,
        grad_scale=grad_scale,
        in_place=in_place,
        implementation=implementation,
    )
    return VocabKLValues(*values)


def vocab_kl_reference(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    mixture: float = 0.5,
) -> torch.Tensor:
    """``tau^2 * D`` of each row [T], of logits [T, V]; differentiable by autograd."""
    q = torch.softmax(student_logits / temperature, dim=-1)
    p = torch.softmax(teacher_logits / temperature, dim=-1)
    return temperature**2 * divergence_reference(p, q, direction=direction, mixture=mixture)

"""Divergence of two models over one sharded vocabulary, with the student's graph.

T rows, Vp local columns. Equations and memory are in the README; ``reference.py`` says the same in
dense torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.implementation import Implementation, check_implementation
from megatron_ext.ops.unit_gradient import hand_over
from megatron_ext.ops.vocab_kl.evaluation import evaluate_vocab_kl


class VocabKL(NamedTuple):
    """What is known of each row [T], replicated over the group; ``row_loss`` has a graph."""

    row_loss: torch.Tensor
    """tau^2 D; with labels, plus the weighted cross-entropy."""

    teacher_entropy: torch.Tensor
    """Entropy of the teacher in nats, at tau."""

    top1_agreement: torch.Tensor
    """bool: both have the same largest logit."""

    cross_entropy: torch.Tensor | None = None
    """-log p(label) in nats, its part of ``row_loss`` before the weight; None without labels."""


def vocab_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    temperature: float = 1.0,
    direction: Divergence = "forward",
    mixture: float = 0.5,
    announced: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> VocabKL:
    """``tau^2 * D(softmax(y / tau) || softmax(z / tau))`` of each row; D as in ``ops/divergence``.

    Args:
        student_logits: [T, Vp] z, any float dtype; the only argument with a gradient.
        teacher_logits: [T, Vpt] y, any float dtype.
        student_shard: This rank's columns.
        teacher_shard: The same real columns; padding can differ.
        announced: [T], the gradient that each ``row_loss`` will get; None: 1. Any other is right as
            well, at the price of a pass over the gradient. But a row announced 0 is not read: it
            has 0 in all its numbers, and no gradient whatever it gets.
        in_place: Overwrite the student's logits with their gradient, if they need one.

    A row whose ``row_loss`` gets no gradient gives none, whatever it holds. Everything is
    accumulated in fp32 (fp64 for fp64 logits of the student). Collectives: forward four all-reduces
    (``evaluate_vocab_kl``), backward none. Keeps the gradient, in the logits' dtype, and no logits.

    Raises:
        LossError: The implementation is unknown or cannot run here.
    """
    check_implementation("vocab_kl", implementation)
    options = {
        "student_shard": student_shard,
        "teacher_shard": teacher_shard,
        "temperature": temperature,
        "direction": direction,
        "mixture": mixture,
        "implementation": implementation,
    }
    return _apply(student_logits, teacher_logits, announced, None, in_place, options)


def vocab_kl_with_ce(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    ce_weight: float | torch.Tensor = 1.0,
    temperature: float = 1.0,
    direction: Divergence = "forward",
    mixture: float = 0.5,
    announced: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> VocabKL:
    """``vocab_kl`` plus ``ce_weight`` times the cross-entropy of the same rows, in one gradient.

    The logits are read as often as for the divergence alone. The cross-entropy is that of
    temperature 1.

    Args:
        labels: int64 [T] global; a row with a negative one has no cross-entropy.
        ce_weight: A number, or [T].
    """
    check_implementation("vocab_kl_with_ce", implementation)
    weights = torch.as_tensor(ce_weight, dtype=torch.float32, device=labels.device)
    options = {
        "student_shard": student_shard,
        "teacher_shard": teacher_shard,
        "temperature": temperature,
        "direction": direction,
        "mixture": mixture,
        "implementation": implementation,
    }
    terms = labels, weights.expand(labels.shape)
    return _apply(student_logits, teacher_logits, announced, terms, in_place, options)


def _apply(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    announced: torch.Tensor | None,
    label_terms: tuple[torch.Tensor, torch.Tensor] | None,
    in_place: bool,
    options: dict[str, Any],
) -> VocabKL:
    wanted = student_logits.requires_grad and torch.is_grad_enabled()
    outputs = _VocabKL.apply(
        student_logits, teacher_logits.detach(), announced, label_terms, wanted, in_place, options
    )
    return VocabKL(*outputs)


class _VocabKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        announced: torch.Tensor | None,
        label_terms: tuple[torch.Tensor, torch.Tensor] | None,
        wanted: bool,
        in_place: bool,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, ...]:
        gradient = None
        if wanted:
            gradient = student_logits.detach() if in_place else torch.empty_like(student_logits)
        labels, weights = (None, None) if label_terms is None else label_terms
        label_announced = weights
        if announced is not None and weights is not None:
            label_announced = weights * announced
        values = evaluate_vocab_kl(
            student_logits,
            teacher_logits,
            labels=labels,
            announced=announced,
            label_announced=label_announced,
            gradient=gradient,
            **options,
        )
        if in_place and wanted:
            torch.autograd.graph.increment_version(student_logits)
        ctx.save_for_backward(gradient, announced)
        ctx.implementation = options["implementation"]
        row_loss, *known, cross_entropy = values
        if cross_entropy is not None and weights is not None:
            row_loss = row_loss + weights.to(row_loss.dtype) * cross_entropy
            known.append(cross_entropy)
        ctx.mark_non_differentiable(*known)
        return row_loss, *known

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        gradient, announced = ctx.saved_tensors
        out = hand_over(gradient, grad, announced, ctx.implementation)
        return out, None, None, None, None, None, None

"""Divergence of two models over one sharded vocabulary, with the student's graph.

T rows, Vp local columns. Equations and memory are in the README; ``reference.py`` says the same in
dense torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.implementation import Implementation, check_implementation
from megatron_ext.ops.unit_gradient import hand_over
from megatron_ext.ops.vocab_kl.evaluation import VocabKLValues, evaluate_vocab_kl


class VocabKL(NamedTuple):
    """What is known of each row [T], replicated over the group; ``row_loss`` has a graph."""

    row_loss: torch.Tensor
    """tau^2 D."""

    teacher_entropy: torch.Tensor
    """Entropy of the teacher in nats, at tau."""

    top1_agreement: torch.Tensor
    """bool: both have the same largest logit."""


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
    evaluate = partial(
        evaluate_vocab_kl,
        student_shard=student_shard,
        teacher_shard=teacher_shard,
        temperature=temperature,
        direction=direction,
        mixture=mixture,
        implementation=implementation,
    )
    wanted = student_logits.requires_grad and torch.is_grad_enabled()
    outputs = _VocabKL.apply(
        student_logits, teacher_logits.detach(), announced, evaluate, wanted, in_place
    )
    return VocabKL(*outputs)


class _VocabKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        announced: torch.Tensor | None,
        evaluate: partial[VocabKLValues],
        wanted: bool,
        in_place: bool,
    ) -> tuple[torch.Tensor, ...]:
        gradient = None
        if wanted:
            gradient = student_logits.detach() if in_place else torch.empty_like(student_logits)
        values = evaluate(student_logits, teacher_logits, announced=announced, gradient=gradient)
        if in_place and wanted:
            torch.autograd.graph.increment_version(student_logits)
        ctx.save_for_backward(gradient, announced)
        ctx.implementation = evaluate.keywords["implementation"]
        ctx.mark_non_differentiable(values.teacher_entropy, values.top1_agreement)
        return values.row_loss, values.teacher_entropy, values.top1_agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        gradient, announced = ctx.saved_tensors
        out = hand_over(gradient, grad, announced, ctx.implementation)
        return out, None, None, None, None, None

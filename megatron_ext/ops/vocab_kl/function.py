"""Divergence of two models over one sharded vocabulary, with the student's graph.

T rows, Vp local columns. Equations and memory are in the README; ``reference.py`` says the same in
dense torch.
"""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import FORWARD_KL, DivergenceOptions
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.unit_gradient import kept_gradient
from megatron_ext.ops.vocab_kl.evaluation import VocabKLValues, evaluate_vocab_kl


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
        grad_scale: [T], the gradient that each ``row_loss`` will get; None: 1. Any other is right
            as well, at the price of a pass over the gradient. But a row of scale 0 is not read: it
            has 0 in all its numbers, and no gradient whatever it gets.
        in_place: Overwrite the student's logits with their gradient, if they need one.

    A row whose ``row_loss`` gets no gradient gives none, whatever it holds. Everything is
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

"""What is likely next, in two numbers a row, for two models, with the student's graph.

T rows, Vp local columns. ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import LogSumExp
from megatron_ext.ops.implementation import Implementation, check_implementation
from megatron_ext.ops.token_likelihood.evaluation import (
    TokenLikelihood,
    TokenRows,
    evaluate_token_likelihood,
    write_likelihood_gradient,
)


def token_likelihood(
    student: TokenRows,
    teacher: TokenRows | None = None,
    *,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> tuple[TokenLikelihood, TokenLikelihood | None]:
    """Log-probabilities of the rows' tokens and log-masses of the models' sets of tokens.

    Each logit is read once for all these numbers, with a peak of its own for the set, so that a
    mass of exp(-1e4) still has its logarithm.

    Args:
        student: Its logits are the only tensor with a gradient.
        teacher: None where its numbers are known. Its shard has the student's group.
        in_place: Let the backward write the gradient over the student's logits. What arrives for
            the two numbers depends on them, so the forward cannot.

    Returns:
        fp32 (fp64 where the student's logits are). Forward: two all-reduces of at most
        [3 (Ts + Tt)]. Backward: none; keeps the student's logits and vectors. A row whose
        gradients are 0 gets none, whatever it holds.

    Raises:
        LossError: The implementation is unknown or cannot run here.
    """
    check_implementation("token_likelihood", implementation)
    log_prob, log_mass, *others = _TokenLikelihood.apply(
        student.logits, student, teacher, in_place, implementation
    )
    known = TokenLikelihood(*others) if others else None
    return TokenLikelihood(log_prob, log_mass), known


class _TokenLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        student: TokenRows,
        teacher: TokenRows | None,
        in_place: bool,
        implementation: Implementation,
    ) -> tuple[torch.Tensor, ...]:
        out = evaluate_token_likelihood(student, teacher, implementation=implementation)
        ctx.save_for_backward(logits, student.token_id, student.members, *out.whole, *out.members)
        ctx.shard, ctx.in_place, ctx.implementation = student.shard, in_place, implementation
        others = () if out.teacher is None else tuple(out.teacher)
        ctx.mark_non_differentiable(*others)
        return (*out.student, *others)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, on_token: torch.Tensor, on_mass: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, None, None, None, None]:
        logits, token_id, members, *vectors = ctx.saved_tensors
        gradient = logits.detach() if ctx.in_place else torch.empty_like(logits)
        student = TokenRows(logits, token_id, members, ctx.shard)
        write_likelihood_gradient(
            student,
            LogSumExp(*vectors[:2]),
            LogSumExp(*vectors[2:]),
            on_token,
            on_mass,
            gradient,
            implementation=ctx.implementation,
        )
        if ctx.in_place:
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None, None

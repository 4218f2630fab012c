"""Projected KL over vocabulary shards, gradient by hand. T rows, Vp local columns, C chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.projected_kl.evaluation import evaluate_projected_kl
from megatron_ext.ops.projected_kl.operands import (
    LearnedEntries,
    ProjectedKL,
    ProjectedKLOptions,
    ShardedProjection,
)
from megatron_ext.ops.unit_gradient import kept_gradient


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
        projection: Without a plan of the entries torch walks them.
        learned: Entries of the projection that have a gradient as well, as if each were free.
        grad_scale: fp32 [C], the gradient that each chunk's loss is going to get; None: 1. It is
            written in the forward, and another one costs a pass. A chunk of scale 0 has no
            gradient, whatever it gets.
        in_place: Overwrite the student's logits with their gradient.

    A chunk whose ``chunk_loss`` gets no gradient gives none to its rows, whatever they hold.
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
        lambda logits, gradient: evaluate(logits, gradient=gradient, grad_scale=grad_scale),
        grad_scale=grad_scale,
        slots=student.rows.slots,
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

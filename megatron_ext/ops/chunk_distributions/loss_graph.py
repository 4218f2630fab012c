"""The graph of a loss whose gradient is written as it is computed. T rows, C chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.unit_gradient import hand_over_chunks

Evaluate = Callable[[torch.Tensor | None], tuple[torch.Tensor, ...]]
"""A core with everything bound but its ``gradient``; its first output is [C], the loss."""


def with_graph(
    logits: torch.Tensor,
    evaluate: Evaluate,
    slots: torch.Tensor,
    *,
    announced: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, ...]:
    """What ``evaluate`` returns, with a graph from the first of it to ``logits`` [T, Vp].

    Args:
        slots: int64 [T], the chunk of each row, C for none.
        announced: [C], what the core was told that each chunk's loss will get.
        in_place: Hand the logits themselves to the core, to be written over.

    Keeps the gradient [T, Vp] for backward, which has no collectives. Without grad mode, or for
    logits that need no gradient, there is none, and nothing is written over.
    """
    wanted = torch.is_grad_enabled() and logits.requires_grad
    outputs: tuple[torch.Tensor, ...] = _WithGraph.apply(
        logits, evaluate, slots, announced, wanted, in_place, implementation
    )
    return outputs


class _WithGraph(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        evaluate: Evaluate,
        slots: torch.Tensor,
        announced: torch.Tensor | None,
        wanted: bool,
        in_place: bool,
        implementation: Implementation,
    ) -> tuple[torch.Tensor, ...]:
        if not wanted:
            return evaluate(None)
        gradient = logits.detach() if in_place else torch.empty_like(logits)
        outputs = evaluate(gradient)
        if in_place:
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(gradient, slots, announced)
        ctx.implementation = implementation
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        gradient, slots, announced = ctx.saved_tensors
        out = hand_over_chunks(gradient, grad, announced, slots, ctx.implementation)
        return out, *[None] * 6

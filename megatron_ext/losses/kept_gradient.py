"""A loss whose forward writes the gradient of the logits, and whose backward hands it over.

B batch, Ts tokens, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.ops.unit_gradient import hand_over

Evaluate = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""From logits [B, Ts, Vp] without a graph, and room [B Ts, Vp] for their gradient or None, to a
scalar."""


def kept_gradient(
    logits: torch.Tensor,
    evaluate: Evaluate,
    *,
    grad_scale: float | torch.Tensor = 1.0,
    in_place: bool = False,
) -> torch.Tensor:
    """What ``evaluate`` returns, with a graph that leads to the logits.

    Args:
        logits: [B, Ts, Vp], any float dtype.
        evaluate: Called once. It may write the gradient over the logits that it is given.
        grad_scale: The upstream gradient for which ``evaluate`` writes. Another one costs a pass
            over the gradient; it is not 0.
        in_place: Overwrite the logits, which nobody reads afterwards, with their gradient. Whoever
            has saved them for a backward of its own gets an error of autograd.

    Keeps the gradient, in the logits' dtype, and no logits; nothing without grad mode. Collectives:
    those of ``evaluate``.
    """
    needed = logits.requires_grad and torch.is_grad_enabled()
    value: torch.Tensor = _KeptGradient.apply(logits, evaluate, grad_scale, needed, in_place)
    return value


class _KeptGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        evaluate: Evaluate,
        grad_scale: float | torch.Tensor,
        needed: bool,
        in_place: bool,
    ) -> torch.Tensor:
        given = logits.detach()
        whole = given.contiguous()
        gradient, is_copy = None, whole is not given
        if needed:
            room = whole if in_place or is_copy else torch.empty_like(whole)
            gradient = room.flatten(0, -2)
        value = evaluate(whole, gradient)
        if needed and in_place and not is_copy and logits.numel():
            # A reader of the logits that comes later is an error of autograd, not a wrong number.
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(gradient)
        ctx.grad_scale, ctx.shape = grad_scale, logits.shape
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        rows = (grad / ctx.grad_scale).expand(len(gradient))
        return hand_over(gradient, rows, None).view(ctx.shape), None, None, None, None

"""Gradients written in the forward, kept until the backward, and scaled to the upstream gradient.

The operations of this package write the gradient of a loss in their forward, where logits and
statistics are at hand, for an upstream gradient of 1 or of a scale that the caller names. The
backward multiplies each row by its upstream gradient over that scale. A row at 1 costs nothing;
any other is read and written again, ``2 b Vp`` bytes at b bytes a logit, up to half the cost of the
loss. T rows, Vp local columns, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import row_slices
from megatron_ext.ops.launch import Implementation, uses_triton

_BLOCK: Final = 8192
_HUGE_FROM: Final = 1 << 22
"""Bytes from which on numpy asks for huge pages."""

Evaluate = Callable[[torch.Tensor, torch.Tensor | None], Sequence[torch.Tensor | None]]
"""Function of logits [T, Vp] without a graph, and of memory [T, Vp] for their gradient or None. It
returns values, the first of which gets a graph: a scalar, or one number for each row or chunk."""


def kept_gradient(
    logits: torch.Tensor,
    evaluate: Evaluate,
    *,
    grad_scale: torch.Tensor | float | None = None,
    slots: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Any, ...]:
    """Values of ``evaluate``, with a graph from the first one to the logits.

    Args:
        logits: [..., Vp], any float dtype, of T rows.
        evaluate: Called once. It may write the gradient over its logits.
        grad_scale: The upstream gradient for which ``evaluate`` writes, of the shape of the first
            value or a scalar; None: 1. Another one costs a pass over the gradient. Rows of
            scale 0 get no gradient.
        slots: int64 [T]: the chunk of each row, negative or C for none, where the first value is
            [C].
        in_place: Overwrite the logits with their gradient; they must not be read afterwards. An
            operation that saved them for its own backward gets an error of autograd.

    Keeps the gradient, in the logits' dtype, and no logits; nothing without grad mode. Collectives:
    those of ``evaluate``, none in the backward.
    """
    needed = logits.requires_grad and torch.is_grad_enabled()
    values: tuple[Any, ...] = _KeptGradient.apply(
        logits, evaluate, grad_scale, slots, needed, in_place, implementation
    )
    return values


@contextmanager
def own_modes(like: torch.Tensor) -> Iterator[None]:
    """Context without the caller's ``torch.autocast`` and ``torch.inference_mode``.

    Products have the precision of their operands in it, and transposed sparse tensors can be
    made of those of a training step. The grad mode stays.
    """
    device, is_grad_enabled = like.device.type, torch.is_grad_enabled()
    with ExitStack() as modes:
        if device != "meta" and torch.is_autocast_enabled(device):
            modes.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.set_grad_enabled(is_grad_enabled))
        yield


def new_rows(like: torch.Tensor) -> torch.Tensor:
    """Memory of the shape and dtype of ``like``, contiguous.

    Where it is large and on a CPU it is numpy's, which asks the kernel for huge pages: with those
    of 4 KiB, touching a gradient for the first time takes longer than writing it.
    """
    size = like.numel() * like.element_size()
    is_filled = (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )
    if like.device.type != "cpu" or size < _HUGE_FROM or is_filled:
        return torch.empty_like(like)
    memory = torch.from_numpy(np.empty(size, dtype=np.uint8))
    return memory.view(like.dtype).view(like.shape)


class _KeptGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        evaluate: Evaluate,
        grad_scale: torch.Tensor | float | None,
        slots: torch.Tensor | None,
        needed: bool,
        in_place: bool,
        implementation: Implementation,
    ) -> tuple[torch.Tensor | None, ...]:
        given = logits.detach()
        whole = given if given.ndim == 2 else given.contiguous()
        rows, is_copy = whole.flatten(0, -2), whole is not given
        gradient = None
        if needed:
            gradient = rows if in_place or is_copy else new_rows(rows)
        with own_modes(logits):
            values = tuple(evaluate(rows, gradient))
        if needed and in_place and not is_copy and logits.numel():
            # A later reader of the logits gets an error of autograd, not a wrong number.
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(gradient, slots)
        ctx.grad_scale, ctx.shape, ctx.implementation = grad_scale, logits.shape, implementation
        ctx.mark_non_differentiable(*(value for value in values[1:] if value is not None))
        # Else each of them gets a gradient of zeros.
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        gradient, slots = ctx.saved_tensors
        out = transfer(
            gradient, grad, ctx.grad_scale, slots=slots, implementation=ctx.implementation
        )
        return out.view(ctx.shape), *[None] * 6


def with_slope(of: torch.Tensor, value: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """``value`` with a graph to ``of``, by which its derivative is ``slope``, entry by entry."""
    out: torch.Tensor = _WithSlope.apply(of, value, slope)
    return out


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, of: torch.Tensor, value: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slope)
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        (slope,) = ctx.saved_tensors
        return None if grad is None else grad * slope, None, None


def transfer(
    gradient: torch.Tensor,
    grad: torch.Tensor,
    grad_scale: torch.Tensor | float | None,
    *,
    slots: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Scale ``gradient`` [T, Vp] from the upstream gradient it was written for to ``grad``.

    In place, unless the backward retains its graph: then a copy is scaled, since the next backward
    needs what the forward wrote. A row of scale 0 holds 0 and stays as it is, unread.

    Args:
        grad: [T], or a scalar for all rows, or [C] with ``slots``.
        grad_scale: The same shape, or a scalar; None: 1.
        slots: int64 [T], the chunk of each row, negative or C for none. Rows of none hold 0, unread
            as well.
    """
    if graph_is_retained():
        gradient = gradient.clone()
        scale_to_(gradient, grad, grad_scale, slots, implementation)
        return gradient
    scale_to_(gradient, grad, grad_scale, slots, implementation)
    # Kernels write unseen by autograd; a reader of the old content must get an error.
    torch.autograd.graph.increment_version(gradient)
    return gradient


def scale_to_(
    gradient: torch.Tensor,
    grad: torch.Tensor,
    grad_scale: torch.Tensor | float | None,
    slots: torch.Tensor | None,
    implementation: Implementation,
) -> None:
    """``transfer`` in place; by kernel one launch."""
    if grad.dtype != torch.float64 and uses_triton(implementation, gradient):
        _scale_by_kernel(gradient, grad, grad_scale, slots)
        return
    scale = grad
    if grad_scale is not None:
        scale = grad / grad_scale
    if isinstance(grad_scale, torch.Tensor):
        scale = scale.masked_fill_(grad_scale == 0, 1.0)
    if slots is not None:
        scale = torch.cat([scale, scale.new_ones(1)])[slots.clamp(min=-1)]
    scale_rows_(gradient, scale.expand(len(gradient)), implementation)


def _scale_by_kernel(
    gradient: torch.Tensor,
    grad: torch.Tensor,
    grad_scale: torch.Tensor | float | None,
    slots: torch.Tensor | None,
) -> None:
    from megatron_ext.ops.triton_math import scale_to_kernel

    rows, width = gradient.shape
    if not rows or not width:
        return
    own = grad_scale.float() if isinstance(grad_scale, torch.Tensor) else None
    common = 1.0 if grad_scale is None or own is not None else float(grad_scale)
    arrives = grad.float()
    scale_to_kernel[(rows, -(-width // _BLOCK))](
        gradient,
        arrives,
        arrives.stride(0) if arrives.ndim else 0,
        own,
        own.stride(0) if own is not None and own.ndim else 0,
        common,
        slots,
        len(arrives) if arrives.ndim else rows,
        gradient.stride(0),
        width,
        BLOCK=_BLOCK,
    )


def graph_is_retained() -> bool:
    """Whether the running backward keeps its graph; True where torch cannot tell."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if tell is None else bool(tell())


def scale_rows_(
    gradient: torch.Tensor, scale: torch.Tensor, implementation: Implementation = "auto"
) -> torch.Tensor:
    """Multiply ``gradient`` [T, Vp] by ``scale`` [T], in place, rounded once. No collectives.

    By kernel, a row at 1 is neither read nor written, so that a forward which knew its scale costs
    nothing here. A row at 0 becomes 0 whatever it holds, NaN included.
    """
    rows, width = gradient.shape
    if uses_triton(implementation, gradient):
        _scale_by_kernel(gradient, scale, None, None)
        return gradient
    for part in row_slices(rows, width, device=gradient.device):
        factors = scale[part, None]
        # Only the host knows without waiting whether there is anything to do.
        if factors.device.type == "cpu" and bool((factors == 1).all()):
            continue
        gradient[part] = (gradient[part] * factors).masked_fill_(factors == 0, 0.0)
    return gradient

"""Losses of hidden states and a head, a tile of logits at a time, with gradients in the forward.

N rows, n rows of a tile, Vp this rank's columns, D hidden.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.vocab_parallel import accumulation_dtype, row_slices
from megatron_ext.errors import LossError
from megatron_ext.ops.tile_plan import Tile, TilePlan
from megatron_ext.ops.unit_gradient import own_modes


class TileLoss(Protocol):
    """Loss of one tile's logits, called once a tile, in order."""

    def __call__(
        self, tile: Tile, logits: torch.Tensor, *, needs_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tile's share of the loss, a scalar without a graph, and its gradient.

        Args:
            tile: Rows of the tile.
            logits: [n, Vp] of the head's dtype. They may be overwritten, as by the gradient.
            needs_gradient: Whether to return d loss / d logits [n, Vp]; else None is returned.
        """


def linear_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tile_loss: TileLoss,
    plan: TilePlan,
    *,
    bias: torch.Tensor | None = None,
    into_main_grad: bool = False,
) -> torch.Tensor:
    """``sum over tiles of tile_loss(hidden[tile] @ weight.T + bias)``, a scalar with a graph.

    The gradients are computed in the forward, tile by tile, for the upstream gradient 1: weights
    and global counts belong into ``tile_loss``. Backward multiplies by what it gets. Without grad
    mode nothing is computed for it; nor for an argument that needs no gradient.

    Args:
        hidden: [Ts, D], all rows of the plan's batch. With vocabulary shards its gradient is this
            rank's part, which the caller sums as for any column-parallel head:
            ``copy_to_shards(hidden, group)``, or megatron-core's gather of a sequence-parallel
            region, whose backward is the reduce-scatter.
        weight: [Vp, D] this rank's rows of the head, of the dtype of ``hidden``.
        plan: With its tensors on the device of ``hidden``.
        bias: [Vp] of the same dtype.
        into_main_grad: Add the weight's gradient to ``weight.main_grad`` in the forward, as
            megatron-core's fused accumulation does in the backward. Then backward has to run, once,
            with the gradient 1; another is an error (on a GPU an assertion of the device). Without
            it the sum is a buffer [Vp, D] in fp32 of its own until backward.

    Memory: one tile of logits [n, Vp], reused, what ``tile_loss`` takes, and the gradients. No
    recomputation: 6 N Vp D FLOPs. Collectives: those of ``tile_loss``, in every tile.

    Raises:
        LossError: Shapes, dtypes or devices that do not fit, or a weight without ``main_grad``.
    """
    _check(hidden, weight, bias, plan)
    main_grad = getattr(weight, "main_grad", None) if into_main_grad else None
    if into_main_grad and main_grad is None:
        raise LossError(
            "the head has no main_grad to add to",
            got=f"a {type(weight).__name__} without it",
            expected="a parameter of a model that megatron-core's DistributedDataParallel wraps",
        )
    with own_modes(hidden):
        out: torch.Tensor = _LinearLoss.apply(
            hidden, weight, bias, tile_loss, plan, main_grad, torch.is_grad_enabled()
        )
    return out


class _LinearLoss(torch.autograd.Function):
    """Keeps the gradients of hidden states, head and bias, and no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tile_loss: TileLoss,
        plan: TilePlan,
        main_grad: torch.Tensor | None,
        is_grad_enabled: bool,
    ) -> torch.Tensor:
        needs = [is_grad_enabled and need for need in ctx.needs_input_grad[:3]]
        dtype = accumulation_dtype(weight.dtype)
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if needs[0] else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=dtype) if needs[2] else None
        d_weight = None
        if needs[1]:
            d_weight = torch.zeros_like(weight, dtype=dtype) if main_grad is None else main_grad
        buffer = weight.new_empty(plan.largest[0], len(weight))
        is_shared = any(tile.shares_last for tile in plan.tiles)
        for tile in plan.tiles:
            part = hidden[plan.student_index(tile)]
            logits = buffer[: tile.student_count]
            if bias is None:
                torch.mm(part, weight.t(), out=logits)
            else:
                torch.addmm(bias, part, weight.t(), out=logits)
            value, gradient = tile_loss(tile, logits, needs_gradient=any(needs))
            loss += value
            if gradient is None:
                continue
            if d_hidden is not None:
                index = plan.student_index(tile)
                if is_shared:
                    d_hidden[index] += gradient @ weight
                else:
                    d_hidden[index] = gradient @ weight
            if d_weight is not None:
                add_weight_gradient_(d_weight, gradient, part)
            if d_bias is not None:
                add_bias_gradient_(d_bias, gradient)
        is_added = main_grad is not None and needs[1]
        ctx.save_for_backward(d_hidden, None if is_added else d_weight, d_bias)
        ctx.weight, ctx.dtype = weight if is_added else None, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        d_hidden, d_weight, d_bias = (
            gradient if gradient is None else _scaled(gradient, grad, ctx.dtype)
            for gradient in ctx.saved_tensors
        )
        if ctx.weight is not None:
            d_weight = _complete_main_grad(ctx.weight, grad)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``gradient * factor`` in ``dtype``, rounded once; on a CPU no pass where the factor is 1."""
    if factor.device.type == "cpu" and factor.item() == 1:
        return gradient.to(dtype)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _complete_main_grad(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor | None:
    """Notify megatron-core's hooks that ``weight.main_grad`` is complete.

    They run when the parameter gets a gradient, and ignore its content if
    ``grad_added_to_main_grad`` is set; so a dummy gradient is returned.
    """
    if factor.device.type == "cpu" and factor.item() != 1:
        raise LossError(
            "the gradient of the head was added to main_grad for the upstream gradient 1",
            got=factor.item(),
            expected="1",
            fix="put loss scale, weights and counts into the tile loss, or take no into_main_grad",
        )
    if factor.is_cuda:
        torch._assert_async(factor == 1)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: TilePlan
) -> None:
    shapes = (tuple(hidden.shape), tuple(weight.shape))
    expected = f"[{plan.student_total}, D] and [Vp, D]"
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][1] != shapes[1][1]:
        raise LossError("hidden states do not fit the head", got=shapes, expected=expected)
    if len(hidden) != plan.student_total:
        raise LossError("hidden states do not fit the tile plan", got=shapes, expected=expected)
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise LossError(
            "hidden states and head differ in dtype",
            got=", ".join(str(tensor.dtype) for tensor in tensors),
            expected="one dtype, which the logits have as well",
        )
    if plan.student_rows.device != hidden.device:
        raise LossError(
            "the tile plan is on another device than the hidden states",
            got=plan.student_rows.device,
            expected=hidden.device,
            fix="plan.to(device), once a microbatch",
        )


def add_weight_gradient_(
    total: torch.Tensor, logit_gradient: torch.Tensor, hidden: torch.Tensor
) -> None:
    """``total += logit_gradient.T @ hidden``, accumulated in the dtype of ``total``.

    Sums in bf16 would lose bits with every tile; so ``total`` is in fp32 while its factors keep
    their dtype. Tensor cores do that in one product; a CPU widens a few columns at a time.

    Args:
        total: [Vp, D] fp32, or the dtype of the factors.
        logit_gradient: [N, Vp]
        hidden: [N, D]

    Raises:
        LossError: On a GPU, factors of another dtype under a torch before 2.8.
    """
    if total.dtype == logit_gradient.dtype:
        total.addmm_(logit_gradient.t(), hidden)
    elif total.is_cuda:
        if torch.__version__ < "2.8":
            raise LossError(
                "torch has no product of bf16 factors that is added to fp32",
                got=f"torch {torch.__version__}",
                expected="torch 2.8 or later",
                fix="install it, or take loss.linear false",
            )
        torch.addmm(total, logit_gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        wide = hidden.to(total.dtype)
        for columns in _column_slices(logit_gradient):
            total[columns].addmm_(logit_gradient[:, columns].t().to(total.dtype), wide)


def add_bias_gradient_(total: torch.Tensor, logit_gradient: torch.Tensor) -> None:
    """``total += logit_gradient.sum(0)``, accumulated in the dtype of ``total`` [Vp]."""
    for columns in _column_slices(logit_gradient):
        total[columns] += logit_gradient[:, columns].sum(dim=0, dtype=total.dtype)


def _column_slices(logit_gradient: torch.Tensor) -> list[slice]:
    rows, width = logit_gradient.shape
    return list(row_slices(width, rows, device=logit_gradient.device))

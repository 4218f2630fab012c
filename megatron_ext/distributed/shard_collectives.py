"""Tensor-parallel collectives with the gradients that replicated losses need. C rows, V columns.

Convention: all ranks of the group end with the same replicated scalar loss, each calls ``backward``
on its own copy, and the gradient of a rank's columns is the slice of the unsharded gradient, not
that slice times the group's size. Hence a sum over shards has the identity as its backward, and a
copy to shards has a sum.

With ``group`` None nothing is communicated and ``torch.distributed`` need not be initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks that share the vocabulary; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def all_reduce_sum(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Sum of ``x`` over the group, without a graph. One all-reduce."""
    return _all_reduce(x, dist.ReduceOp.SUM, group)


def all_reduce_max(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Maximum of ``x`` over the group, without a graph. One all-reduce."""
    return _all_reduce(x, dist.ReduceOp.MAX, group)


def all_reduce_min(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Minimum of ``x`` over the group, without a graph. One all-reduce."""
    return _all_reduce(x, dist.ReduceOp.MIN, group)


def sum_over_shards(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Sum of every rank's ``x``: one all-reduce forward, the identity backward."""
    out: torch.Tensor = _SumOverShards.apply(x, group)
    return out


def copy_to_shards(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """``x``, which is already replicated: the identity forward, one all-reduce backward."""
    out: torch.Tensor = _CopyToShards.apply(x, group)
    return out


def reduce_scatter_columns(x: torch.Tensor, width: int, group: ProcessGroup | None) -> torch.Tensor:
    """Sum ``x`` over the ranks and keep this rank's ``width`` columns.

    Args:
        x: [C, V] with V <= ``width * group_size``; columns missing at the end count as zero.
        width: Columns each rank keeps, equal on all of them (``VocabShard.width``).

    Returns:
        [C, width]. Forward: one reduce-scatter. Backward: one all-gather.
    """
    out: torch.Tensor = _ReduceScatterColumns.apply(x, width, group)
    return out


def gather_columns(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Join every rank's [C, width] to [C, width * group_size], no graph. One all-gather."""
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(group_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def sum_columns(x: torch.Tensor, width: int, group: ProcessGroup | None) -> torch.Tensor:
    """``reduce_scatter_columns`` without a graph. One reduce-scatter.

    CPU tensors travel through gloo, which has no reduce-scatter before torch 2.7: there it is one
    all-reduce, of which each rank keeps its slice.
    """
    missing = width * group_size(group) - x.shape[-1]
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    if group is None:
        return x
    start = dist.get_rank(group) * width
    if x.device.type == "cpu":
        return all_reduce_sum(x, group)[..., start : start + width].contiguous()
    out = x.new_empty(*x.shape[:-1], width)
    dist.reduce_scatter(out, [part.contiguous() for part in x.split(width, -1)], group=group)
    return out


def _all_reduce(
    x: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: ProcessGroup | None
) -> torch.Tensor:
    if group is None:
        return x.detach()
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=operation, group=group)
    return total


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_sum(grad, ctx.group), None


class _ReduceScatterColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, group: ProcessGroup | None) -> torch.Tensor:
        ctx.columns, ctx.group = x.shape[-1], group
        return sum_columns(x, width, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_columns(grad, ctx.group)[..., : ctx.columns], None, None

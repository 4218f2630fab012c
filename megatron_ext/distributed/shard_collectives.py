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


def gather_columns(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Join every rank's [C, width] to [C, width * group_size], no graph. One all-gather."""
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(group_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def sum_columns(x: torch.Tensor, width: int, group: ProcessGroup | None) -> torch.Tensor:
    """Sum ``x`` over the ranks and keep ``width`` columns on each. One reduce-scatter, no graph.

    Args:
        x: [C, V] with V <= ``width * group_size``; columns missing at the end count as zero.
        width: Columns each rank keeps, equal on all of them (``VocabShard.width``).

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


def recut_columns(
    x: torch.Tensor, width: int, count: int, group: ProcessGroup | None
) -> torch.Tensor:
    """This rank's part of columns that are cut into ``width`` a rank instead, without a graph.

    Args:
        x: [..., held] this rank's columns, in rank order and equally many on every rank.
        width: Columns of each rank afterwards.
        count: Columns of the whole that are kept; those behind become 0.

    Returns:
        [..., width]. One all-to-all of the columns that change ranks; none on one rank.
    """
    x = x.detach()
    ranks, held = group_size(group), x.shape[-1]
    rank = 0 if group is None else dist.get_rank(group)

    def common(owner: int, receiver: int) -> range:
        last = min((owner + 1) * held, (receiver + 1) * width, count)
        return range(max(owner * held, receiver * width), last)

    def sliced(columns: range, start: int) -> slice:
        # An empty range may lie before ``start``.
        return slice(columns[0] - start, columns[-1] + 1 - start) if columns else slice(0, 0)

    out = x.new_zeros(*x.shape[:-1], width)
    stays = common(rank, rank)
    out[..., sliced(stays, rank * width)] = x[..., sliced(stays, rank * held)]
    if group is None or ranks == 1:
        return out
    others = [other for other in range(ranks) if other != rank]
    sent = {other: common(rank, other) for other in others}
    received = {other: common(other, rank) for other in others}
    parts = [x[..., sliced(sent[other], rank * held)].movedim(-1, 0) for other in others]
    arrived = x.new_empty(sum(map(len, received.values())), *x.shape[:-1])
    dist.all_to_all_single(
        arrived,
        torch.cat(parts).contiguous(),
        [len(received.get(other, ())) for other in range(ranks)],
        [len(sent.get(other, ())) for other in range(ranks)],
        group=group,
    )
    for part, other in zip(arrived.split([*map(len, received.values())]), others, strict=True):
        out[..., sliced(received[other], rank * width)] = part.movedim(0, -1)
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

"""Sequences that are cut over a context-parallel group, and rows that move between its ranks.

N rows of this rank, M rows of the result. Everything about who holds and who needs a row is known
on the host, on every rank alike; only the rows themselves are sent.

Where a rank stands among those that share every sequence. T positions of a row, n ranks.

Rows are cut in megatron-core's order (``zigzag`` of ``SequenceLayout``): into 2n slices, of which
rank ``r`` has slices ``r`` and ``2n - 1 - r``, one after the other. So every rank has as much to do
under a causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from megatron_ext.errors import LossError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SequenceOrder = Literal["contiguous", "zigzag"]
"""How a sequence is cut over the ranks. ``contiguous``: into as many equal slices, one a rank.
``zigzag``: into twice as many; rank ``r`` of ``n`` holds slices ``r`` and ``2n - 1 - r``, as
megatron-core does to give every rank the same work under a causal mask."""


BLANK_ROW: Final = -1
"""Stands for a row of zeros among the rows that a rank needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """How the sequences of one model are cut. A rank holds its positions in ascending order."""

    size: int
    """Ranks of the context-parallel group."""

    order: SequenceOrder = "zigzag"

    def holders(self, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rank [T] that holds each position of sequences laid one after the other.

        Args:
            bounds: [S + 1] where each sequence begins, and the end; each is cut by itself.

        Raises:
            LossError: A sequence that does not divide into equal slices.
        """
        slices = self.size * (2 if self.order == "zigzag" else 1)
        lengths = np.diff(bounds)
        if (lengths % slices).any():
            raise LossError(
                f"a sequence does not divide into the slices of a {self.order} layout",
                got=f"length {int(lengths[lengths % slices != 0][0])}",
                expected=f"a multiple of {slices} ({self.size} context-parallel ranks)",
                fix="pad sequences to a multiple of it",
            )
        within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
        index = within // np.repeat(lengths // slices, lengths)
        rank: NDArray[np.int64] = index
        return rank if self.order == "contiguous" else np.minimum(rank, slices - 1 - rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExchange:
    """One rank's part of an exchange, after which it has M rows: some of its own, some of others'.

    Index tensors are int64; see ``plan`` for what they are made from.
    """

    source: torch.Tensor
    """[M] this rank's row that stays, 0 where there is none."""

    target: torch.Tensor
    """[N] where a row stays in the result, 0 where it does not."""

    leaving: torch.Tensor
    """Rows of this rank, ascending, that do not stay."""

    sent: torch.Tensor
    """Rows of this rank to send, those for rank 0 first. A row can stay and be sent too."""

    received: torch.Tensor
    """Rows of the result that come from elsewhere, those from rank 0 first."""

    blank: torch.Tensor
    """Rows of the result that are zeros."""

    sent_counts: tuple[int, ...]
    received_counts: tuple[int, ...]
    group: ProcessGroup | None = None
    """None: one rank has every row, and nothing is sent."""

    @classmethod
    def plan(
        cls,
        holder: NDArray[np.int64],
        needed: Sequence[NDArray[np.int64]],
        *,
        rank: int,
        group: ProcessGroup | None,
    ) -> RowExchange:
        """Plan on the host; every rank calls it with the same ``holder`` and ``needed``.

        Args:
            holder: [rows of all ranks] who holds each row.
            needed: For each rank the rows that it wants in its order, ``BLANK_ROW`` for zeros.
            rank: This rank in ``group``.
        """
        own = np.flatnonzero(holder == rank)
        local = np.zeros(len(holder), dtype=np.int64)
        local[own] = np.arange(len(own))
        wanted, origin = needed[rank], _origins(holder, needed[rank])
        stays = origin == rank
        source = np.where(stays, local[wanted], 0)
        target, is_leaving = np.zeros(len(own), np.int64), np.ones(len(own), np.bool_)
        target[source[stays]] = np.flatnonzero(stays)
        is_leaving[source[stays]] = False
        others = [peer for peer in range(len(needed)) if peer != rank]
        sent = [local[rows[_origins(holder, rows) == rank]] for rows in needed]
        sent[rank] = sent[rank][:0]
        received = [np.flatnonzero(origin == peer) for peer in range(len(needed))]
        received[rank] = received[rank][:0]
        assert group is not None or not others
        return cls(
            source=torch.from_numpy(source),
            target=torch.from_numpy(target),
            leaving=torch.from_numpy(np.flatnonzero(is_leaving)),
            sent=torch.from_numpy(np.concatenate(sent)),
            received=torch.from_numpy(np.concatenate(received)),
            blank=torch.from_numpy(np.flatnonzero(wanted == BLANK_ROW)),
            sent_counts=tuple(map(len, sent)),
            received_counts=tuple(map(len, received)),
            group=group,
        )

    def to(self, device: torch.device | str) -> RowExchange:
        """The same plan on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in values.items()
            if torch.is_tensor(value)
        }
        return replace(self, **tensors)


def _origins(holder: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who holds each row; nobody, -1, a blank one."""
    return np.where(rows == BLANK_ROW, -1, holder[rows])


def exchange_rows(x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """This rank's N rows to the M rows that it needs.

    Args:
        x: [N, ...] of a dtype and a row shape that are the same on every rank.

    Returns:
        [M, ...], a copy. One all-to-all forward, of the sent rows alone; one more backward, which
        brings their gradients home. Ranks that neither send nor receive make them too.
    """
    out: torch.Tensor = _ExchangeRows.apply(x, exchange)
    return out


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        out = _picked(x, exchange.source)
        arrived = _all_to_all(
            x.index_select(0, exchange.sent),
            exchange.sent_counts,
            exchange.received_counts,
            exchange.group,
        )
        return out.index_copy_(0, exchange.received, arrived).index_fill_(0, exchange.blank, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange: RowExchange = ctx.exchange
        returned = _all_to_all(
            grad.index_select(0, exchange.received),
            exchange.received_counts,
            exchange.sent_counts,
            exchange.group,
        )
        out = _picked(grad, exchange.target).index_fill_(0, exchange.leaving, 0.0)
        return out.index_add_(0, exchange.sent, returned), None


def _picked(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]``; without rows in ``x``, all of the result is to be overwritten."""
    return x.index_select(0, rows) if len(x) else x.new_zeros(len(rows), *x.shape[1:])


def _all_to_all(
    rows: torch.Tensor,
    sent_counts: tuple[int, ...],
    received_counts: tuple[int, ...],
    group: ProcessGroup | None,
) -> torch.Tensor:
    if group is None:
        return rows
    out = rows.new_empty(sum(received_counts), *rows.shape[1:])
    dist.all_to_all_single(
        out, rows.contiguous(), list(received_counts), list(sent_counts), group=group
    )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRank:
    """One of ``size`` ranks."""

    rank: int
    size: int

    group: ProcessGroup | None = None
    """None only where nothing is sent."""

    @classmethod
    def of(cls, group: ProcessGroup) -> ContextRank | None:
        """This rank in a context-parallel group; None where it has the sequences alone."""
        size = dist.get_world_size(group)
        return cls(rank=dist.get_rank(group), size=size, group=group) if size > 1 else None

    @property
    def layout(self) -> SequenceLayout:
        """How sequences are cut."""
        return SequenceLayout(size=self.size)

    def first_positions(self, length: int) -> tuple[int, int]:
        """Where this rank's two slices of a row of T positions begin; each has T / 2n."""
        slice_length = length // (2 * self.size)
        return self.rank * slice_length, (2 * self.size - 1 - self.rank) * slice_length

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T / n, ...] this rank's part of rows [B, T, ...], a copy; T is a multiple of 2n."""
        length = rows.shape[1]
        assert length % (2 * self.size) == 0
        width = length // (2 * self.size)
        slices = [rows.narrow(1, first, width) for first in self.first_positions(length)]
        return torch.cat(slices, dim=1)


def in_order(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """[T, ...] in the order of positions, of what all ranks have [T, ...], rank after rank."""
    slices = gathered.unflatten(0, (size, 2, -1))
    # First slices ascend with the rank, second ones descend.
    return torch.cat([slices[:, 0], slices[:, 1].flip(0)]).flatten(0, 1)

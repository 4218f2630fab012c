"""Context parallelism: the layout of cut sequences, and the exchange of rows between ranks.

N rows of this rank, M rows of the result, T positions of a sequence, n ranks. The host of every
rank knows which rank holds and which needs a row; only the rows themselves are sent.
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
"""Cut of a sequence over n ranks. ``contiguous``: n equal slices, one a rank. ``zigzag``: 2n
slices, of which rank ``r`` holds ``r`` and then ``2n - 1 - r``, as megatron-core does to give every
rank the same work under a causal mask."""


BLANK_ROW: Final = -1
"""Placeholder for a row of zeros among the rows that a rank needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Cut of one model's sequences. A rank holds its positions in ascending order."""

    size: int
    """Ranks of the context-parallel group."""

    order: SequenceOrder = "zigzag"

    def holders(self, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rank [T] that holds each position of the concatenated sequences.

        Args:
            bounds: [S + 1] start of each sequence, and the end; each sequence is cut by itself.

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
    """One rank's part of an exchange, after which it has M rows: its own and other ranks'.

    Index tensors are int64; ``plan`` makes them.
    """

    source: torch.Tensor
    """[M] this rank's row that is kept, 0 where the row is another rank's or blank."""

    target: torch.Tensor
    """[N] place of a kept row in the result, 0 for a row that is not kept."""

    leaving: torch.Tensor
    """Rows of this rank that are not kept, ascending."""

    sent: torch.Tensor
    """Rows of this rank to send, those for rank 0 first. A kept row can be sent too."""

    received: torch.Tensor
    """Rows of the result that come from other ranks, those from rank 0 first."""

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
            holder: [rows of all ranks] the rank that holds each row.
            needed: Rows that each rank needs, in its order; ``BLANK_ROW`` for zeros.
            rank: This rank in ``group``.
        """
        held = np.flatnonzero(holder == rank)
        local = np.zeros(len(holder), dtype=np.int64)
        local[held] = np.arange(len(held))
        rows_here, origin = needed[rank], _origins(holder, needed[rank])
        is_kept = origin == rank
        source = np.where(is_kept, local[rows_here], 0)
        target, is_leaving = np.zeros(len(held), np.int64), np.ones(len(held), np.bool_)
        target[source[is_kept]] = np.flatnonzero(is_kept)
        is_leaving[source[is_kept]] = False
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
            blank=torch.from_numpy(np.flatnonzero(rows_here == BLANK_ROW)),
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
    """Rank that holds each row, -1 for a blank one."""
    return np.where(rows == BLANK_ROW, -1, holder[rows])


def exchange_rows(x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Exchange this rank's N rows for the M rows that it needs.

    Args:
        x: [N, ...] of a dtype and a row shape that are the same on every rank.

    Returns:
        [M, ...], a copy. One all-to-all forward, of the sent rows alone; one more backward, of
        their gradients. Ranks that neither send nor receive make them too.
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
    """``x[rows]``; zeros where ``x`` has no rows, which the caller overwrites."""
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
    """This rank's place among the ``size`` ranks that share every sequence."""

    rank: int
    size: int

    group: ProcessGroup | None = None
    """None only where nothing is sent."""

    @classmethod
    def of(cls, group: ProcessGroup) -> ContextRank | None:
        """This rank in a context-parallel group; None for a group of one rank."""
        size = dist.get_world_size(group)
        return cls(rank=dist.get_rank(group), size=size, group=group) if size > 1 else None

    @property
    def layout(self) -> SequenceLayout:
        """Layout of the sequences."""
        return SequenceLayout(size=self.size)

    def first_positions(self, length: int) -> tuple[int, int]:
        """Starts of this rank's two slices of a row of T positions; each slice has T / 2n."""
        slice_length = length // (2 * self.size)
        return self.rank * slice_length, (2 * self.size - 1 - self.rank) * slice_length

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy [B, T / n, ...] of this rank's part of rows [B, T, ...]; T is a multiple of 2n."""
        length = rows.shape[1]
        assert length % (2 * self.size) == 0
        width = length // (2 * self.size)
        slices = [rows.narrow(1, first, width) for first in self.first_positions(length)]
        return torch.cat(slices, dim=1)


def in_order(gathered: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder all ranks' parts, joined rank after rank [T, ...], to the order of positions."""
    slices = gathered.unflatten(0, (size, 2, -1))
    # First slices ascend with the rank, second ones descend.
    return torch.cat([slices[:, 0], slices[:, 1].flip(0)]).flatten(0, 1)


def by_rank(ordered: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of ``in_order``."""
    halves = ordered.unflatten(0, (2, size, -1))
    return torch.stack((halves[0], halves[1].flip(0)), dim=1).flatten(0, 2)

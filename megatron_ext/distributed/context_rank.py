"""Where a rank stands among those that share every sequence. T positions of a row, n ranks.

Rows are cut in megatron-core's order (``zigzag`` of ``SequenceLayout``): into 2n slices, of which
rank ``r`` has slices ``r`` and ``2n - 1 - r``, one after the other. So every rank has as much to do
under a causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_ext.distributed.context_parallel import SequenceLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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

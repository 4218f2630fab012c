"""Sums by index that come out the same each time. N values, G sums."""

from __future__ import annotations

import torch


def index_sum(values: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """``zeros(count).index_add(0, index, values)`` [G], with a graph.

    On a GPU ``index_add`` adds in the order in which threads come, another one on every rank and in
    every run; ``index_put`` sorts the indices first. For vectors: the sort costs more than the sum.

    Args:
        values: [N]
        index: int64 [N], below ``count``.
    """
    return values.new_zeros(count).index_put((index,), values, accumulate=True)

"""Entries of a projection that are trained. N entries, C chunks, Vps local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LearnedEntries(NamedTuple):
    """Some entries of this rank's rows; ``value`` is where their gradient goes."""

    value: torch.Tensor
    """[N] with a graph; the same numbers as in ``weight``."""

    row: torch.Tensor
    """int64 [N] student column of this rank."""

    column: torch.Tensor
    """int64 [N] teacher column, over all shards."""


def entry_gradient(
    means: torch.Tensor,
    slope: torch.Tensor,
    scale: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
) -> torch.Tensor:
    """``sum_c scale_c * means_c[row] * slope_c[column]`` (README, equation 11): [N].

    Args:
        means: [C, Vps] the student's chunk means.
        slope: [C, Vt] dD_c/dQ~_c of every teacher column.
        scale: [C]; a chunk at 0 is not looked at, NaN included.
    """
    weight = scale[:, None]
    terms = means[:, row].mul_(slope[:, column]).mul_(weight)
    return terms.masked_fill_(weight == 0, 0.0).sum(dim=0)

"""How a chunk's mapped columns are read, however little of the student's mass is on them.

T rows, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp
from megatron_ext.ops.chunk_rows import ChunkRows


class CarriedRows(NamedTuple):
    """Normalisers of the columns that W carries over; README, equation 14."""

    lse: LogSumExp
    """[T] the row's own, but in chunks that are scaled up."""

    is_scaled: torch.Tensor
    """bool [C]: no row has more than a unit of rounding of its mass on mapped columns."""

    is_empty: torch.Tensor
    """bool [C]: no row has any mass there, every mapped column being masked."""


def carried_rows(own: LogSumExp, inside: LogSumExp, rows: ChunkRows) -> CarriedRows:
    """From the rows' sums over all columns and over the mapped ones, [T]. No collectives."""
    share = log_ratio(inside, own)
    largest = share.new_full((rows.chunk_count + 1,), -torch.inf)
    largest.scatter_reduce_(0, rows.slots, share, "amax")
    is_scaled = (largest > -torch.inf) & (largest.exp() < torch.finfo(share.dtype).eps)
    # Rows of no chunk are not read; a row without mapped mass has nothing to scale.
    is_scaled[-1] = False
    scaled = is_scaled[rows.slots] & (share > -torch.inf)
    below = (share - largest[rows.slots]).masked_fill(~scaled, 0.0)
    lse = LogSumExp(
        torch.where(scaled, inside.peak, own.peak),
        torch.where(scaled, inside.log_sum - below, own.log_sum),
    )
    return CarriedRows(lse, is_scaled[:-1], largest[:-1] == -torch.inf)


def log_ratio(part: LogSumExp, whole: LogSumExp) -> torch.Tensor:
    """Logarithm of the share of ``part`` in ``whole``, [T]."""
    return (part.peak - whole.peak).add_(part.log_sum).sub_(whole.log_sum)

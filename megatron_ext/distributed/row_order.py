"""Rows of a matrix that is cut over ranks, in another order. V rows, R ranks, Vp rows of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.distributed.shard_collectives import group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def reordered_rows(
    rows: torch.Tensor, sources: NDArray[np.int64], group: ProcessGroup | None
) -> torch.Tensor:
    """This rank's rows of ``whole[sources]``, where ``whole`` [V, ...] is all ranks' rows joined.

    One all-to-all: a rank receives the rows that it lacks, at most ``Vp`` of them, and sends as
    many. Beside the result there is one copy of what is sent and one of what arrives.

    Args:
        rows: [Vp, ...] this rank's, of one shape and dtype on every rank.
        sources: [V] the row that each place gets, the same on every rank.
        group: The ranks, in the order of their rows; None: one rank has them all.

    Returns:
        [Vp, ...], without a graph.
    """
    detached = rows.detach()
    ranks = group_size(group)
    if ranks == 1:
        return detached.index_select(0, _index(sources, rows.device))
    own, width = dist.get_rank(group), len(rows)
    wanted = sources.reshape(ranks, width)
    owner = wanted // width
    sent = [wanted[rank][owner[rank] == own] - own * width for rank in range(ranks)]
    received_counts = np.bincount(owner[own], minlength=ranks).tolist()
    arrived = detached.new_empty(rows.shape)
    dist.all_to_all_single(
        arrived,
        detached.index_select(0, _index(np.concatenate(sent), rows.device)),
        received_counts,
        [len(part) for part in sent],
        group=group,
    )
    # Rows arrive by their owner, and of one owner in the order of their places.
    arrival = np.argsort(owner[own], kind="stable")
    return torch.empty_like(arrived).index_copy_(0, _index(arrival, rows.device), arrived)


def _index(rows: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int64)).to(device)

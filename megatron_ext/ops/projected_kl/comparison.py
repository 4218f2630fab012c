"""Columns of two chunk distributions that are pooled into one. C chunks, Vpt local columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, gather_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def kept_threshold(
    p: torch.Tensor, vocab_topk: int, vocab_size: int, group: ProcessGroup | None
) -> torch.Tensor | None:
    """The ``vocab_topk``-th largest probability of each chunk [C], over all shards.

    None where that is every column. Columns below it make up the rest; of equals all are kept, so
    that which ones are does not depend on the layout. One all-gather of [C, vocab_topk].
    """
    if vocab_topk >= vocab_size:
        return None
    local = p.topk(min(vocab_topk, p.shape[-1]), dim=-1).values
    everywhere = gather_columns(local, group)
    return everywhere.topk(min(vocab_topk, everywhere.shape[-1]), dim=-1).values[:, -1]


def pool_rest(
    p: torch.Tensor, projected: torch.Tensor, rest: torch.Tensor, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``p`` and ``projected`` with the pooled masses in every column of ``rest``, and these [2, C].

    The masses are sums of what is pooled, not one minus what is kept: a small rest stays exact.
    One all-reduce of [2, C].
    """
    sides = (p, projected)
    local = torch.stack([torch.where(rest, side, 0.0).sum(dim=-1) for side in sides])
    pooled = all_reduce_sum(local, group)
    p, projected = (
        torch.where(rest, mass[:, None], side) for mass, side in zip(pooled, sides, strict=True)
    )
    return p, projected, pooled

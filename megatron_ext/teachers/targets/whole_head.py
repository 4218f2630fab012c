"""A teacher's head in one piece, for those who have only its hidden states."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ext.distributed.shard_collectives import group_size
from megatron_ext.distributed.vocab_parallel import VocabShard


def whole_head(own: torch.Tensor, shard: VocabShard, *, is_kept: bool) -> torch.Tensor | None:
    """[V, D] on the CPU, without padding.

    Args:
        own: [Vp, D] this rank's rows.
        is_kept: Whether this rank wants it; None is returned to one that does not.

    Collectives: one all-gather over the shard's group.
    """
    parts = [own.detach().contiguous()]
    if shard.group is not None:
        parts = [torch.empty_like(parts[0]) for _ in range(group_size(shard.group))]
        dist.all_gather(parts, own.detach().contiguous(), group=shard.group)
    if not is_kept:
        return None
    return torch.cat([part.cpu() for part in parts])[: shard.vocab_size].contiguous()

"""Whether the ranks of a group hold a vocabulary between them, each its own part."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ext.distributed.shard_collectives import gather_columns, group_size
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError


def check_shard(shard: VocabShard, *, side: str) -> None:
    """Check one rank's part by its rank and the size of its group. No collectives.

    Args:
        side: Whose it is, for errors: ``"student"``.

    Raises:
        LossError: It is not the part of this rank, or the parts do not cover the vocabulary.
    """
    size = group_size(shard.group)
    rank = 0 if shard.group is None else dist.get_rank(shard.group)
    if shard.start != rank * shard.width:
        raise LossError(
            f"the {side}'s vocabulary shard is not that of rank {rank}",
            got=f"columns {shard.start} to {shard.stop}",
            expected=f"columns {rank * shard.width} to {(rank + 1) * shard.width}",
        )
    if size * shard.width < shard.vocab_size:
        raise LossError(
            f"the {side}'s vocabulary shards do not cover the vocabulary",
            got=f"{size} of {shard.width} columns",
            expected=f"at least {shard.vocab_size} columns together",
        )


def check_shards_agree(shard: VocabShard, *, side: str, device: torch.device | str) -> None:
    """``check_shard`` on every rank, and all of one width and vocabulary.

    To be called once, before training: one all-gather of three numbers, and the host waits for it.

    Raises:
        LossError: On every rank, if the shards of two differ or one is not its rank's.
    """
    own = torch.tensor([[shard.start, shard.width, shard.vocab_size]], device=device)
    ranks = gather_columns(own, shard.group).reshape(-1, 3).tolist()
    width, vocab_size = ranks[0][1:]
    for rank, (start, other_width, other_size) in enumerate(ranks):
        if (start, other_width, other_size) != (rank * width, width, vocab_size):
            raise LossError(
                f"the {side}'s vocabulary shards differ between ranks",
                got=f"rank {rank} has columns {start} to {start + other_width} of {other_size} "
                "tokens",
                expected=f"columns {rank * width} to {(rank + 1) * width} of {vocab_size}",
            )
    check_shard(shard, side=side)

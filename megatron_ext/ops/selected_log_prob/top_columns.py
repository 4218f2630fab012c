"""The largest columns of a sharded vocabulary. T rows, Vp local columns, K columns."""

from __future__ import annotations

from typing import Final

import torch

from megatron_ext.distributed.shard_collectives import gather_columns
from megatron_ext.distributed.vocab_parallel import VocabShard, row_slices

_NO_COLUMN: Final = torch.iinfo(torch.int64).min
_ID_BITS: Final = 32
_ID_MASK: Final = (1 << _ID_BITS) - 1


def top_columns(
    logits: torch.Tensor, k: int, shard: VocabShard, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """Global columns of the ``k`` largest logits of each row, of equals the lowest columns.

    Equal logits are common in bf16; so which columns are taken does not depend on the layout.

    Args:
        logits: [T, Vp], any float dtype, compared in fp32.
        allowed: bool [Vp], the columns to choose from; None: all real ones.

    Returns:
        int64 [T, k], the largest first, -1 where fewer are allowed. The same on every rank. One
        all-gather of int64 [T, min(k, Vp)].
    """
    excluded = shard.excluded_columns(logits.device, allowed)
    ids = torch.arange(shard.start, shard.stop, device=logits.device)
    width = min(k, shard.width)
    local = torch.empty(logits.shape[0], width, dtype=torch.int64, device=logits.device)
    for rows in row_slices(*logits.shape, device=logits.device):
        keys = sort_keys(logits[rows], ids)
        if excluded is not None:
            keys.masked_fill_(excluded, _NO_COLUMN)
        local[rows] = keys.topk(width, dim=-1).values
    everywhere = gather_columns(local, shard.group)
    keys = everywhere.topk(min(k, everywhere.shape[-1]), dim=-1).values
    columns = torch.where(keys == _NO_COLUMN, -1, _ID_MASK - (keys & _ID_MASK))
    return torch.nn.functional.pad(columns, (0, k - columns.shape[-1]), value=-1)


def sort_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort as (value, -id): fp32 values [..., V], ids below 2^32 [..., V]."""
    # 0.0 and -0.0 are equal, and not the same bits.
    bits = (values.detach().float() + 0.0).view(torch.int32).to(torch.int64)
    # The bits of negative numbers grow with their magnitude.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << _ID_BITS) | (_ID_MASK - ids)

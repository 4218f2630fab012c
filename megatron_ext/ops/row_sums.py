"""Sums of exponentials that vocabulary shards merge in one exchange. T rows, Vp local columns.

They are a peak and a sum of ``exp(logit - peak)`` for each row, over whatever columns. The logit of
a single column is such a sum as well, which is 1 on the rank that has it and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_min
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    merge_log_sum_exp,
)


class ExpSums(NamedTuple):
    """Of this rank's columns, one dtype, [T] each."""

    peak: torch.Tensor
    """0 where there is no column."""

    total: torch.Tensor


def merge_exp_sums(sums: Sequence[ExpSums], shard: VocabShard) -> list[LogSumExp]:
    """Each of the sums over all shards, in the first one's dtype. Two all-reduces.

    Lanes may have different numbers of rows.
    """
    dtype = sums[0].peak.dtype
    peak, total = (torch.cat(parts).to(dtype) for parts in zip(*sums, strict=True))
    lengths = [len(part.peak) for part in sums]
    merged = merge_log_sum_exp(peak, total, shard.group)
    split = (part.split(lengths) for part in merged)
    return [LogSumExp(*parts) for parts in zip(*split, strict=True)]


def local_column(token_id: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """int64 [T]: this rank's column of each row's token, -1 where it is not here."""
    column = token_id - shard.start
    here = (token_id >= 0) & (column >= 0) & (column < shard.valid_width)
    return torch.where(here, column, -1)


def token_exp_sums(logits: torch.Tensor, column: torch.Tensor, temperature: float = 1.0) -> ExpSums:
    """The logits, over the temperature, at ``column`` int64 [T]; -1: not on this rank."""
    here = column >= 0
    picked = logits.detach().gather(-1, column.clamp(min=0)[:, None])[:, 0]
    picked = picked.to(accumulation_dtype(logits.dtype)) / temperature
    return ExpSums(torch.where(here, picked, 0.0), here.to(picked.dtype))


def token_log_probs(
    token: LogSumExp, whole: LogSumExp, token_id: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """[T] of merged sums: NaN beyond the vocabulary, 0 for a negative ``token_id``."""
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    log_prob = (token.peak - whole.peak).add_(token.log_sum).sub_(whole.log_sum)
    log_prob.masked_fill_(token_id >= shard.vocab_size, torch.nan)
    return log_prob.masked_fill_(token_id < 0, 0.0)


def merge_top_columns(
    columns: Sequence[torch.Tensor],
    local: Sequence[ExpSums],
    merged: Sequence[LogSumExp],
    shards: Sequence[VocabShard],
) -> list[torch.Tensor]:
    """Global columns int64 [T] of the largest logits, the first of equals. One all-reduce.

    Args:
        columns: This rank's columns of each model's largest logits, local.
        local: Lanes over all its columns.
        merged: The same over all shards.
    """
    found = []
    for column, part, whole, shard in zip(columns, local, merged, shards, strict=True):
        own = column + shard.start
        if shard.group is not None:
            beaten = (part.peak != whole.peak) | (part.total == 0)
            own = own.masked_fill(beaten, torch.iinfo(torch.int64).max)
        found.append(own)
    first = all_reduce_min(torch.cat(found), shards[0].group)
    return list(first.split([len(column) for column in columns]))

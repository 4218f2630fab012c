"""What a teacher keeps of its predictions: k logits a row and what normalises all of them.

T rows, Vp local columns, K columns kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import gather_columns, group_size
from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, row_slices
from megatron_ext.errors import LossError
from megatron_ext.ops.implementation import Implementation, check_implementation
from megatron_ext.ops.selected_log_prob import sort_keys
from megatron_ext.ops.softmax_statistics import row_statistics
from megatron_ext.ops.top_log_probs.packed_key import (
    NO_KEY,
    key_columns,
    key_values,
    pack_pair,
    unpack_pair,
)


class TopLogProbs(NamedTuple):
    """The same on every rank, without a graph."""

    token_id: torch.Tensor
    """int64 [T, K]: global columns of the largest logits, of equals the lowest column first."""

    logit: torch.Tensor
    """fp32 [T, K], descending."""

    normaliser: LogSumExp
    """fp32 [T]: of all real columns over all shards, at temperature 1."""

    @property
    def log_prob(self) -> torch.Tensor:
        """fp32 [T, K]"""
        return (self.logit - self.normaliser.peak[:, None]) - self.normaliser.log_sum[:, None]


def top_log_probs(
    logits: torch.Tensor,
    k: int,
    shard: VocabShard,
    *,
    implementation: Implementation = "auto",
) -> TopLogProbs:
    """The ``k`` most probable tokens of each row, and the log-sum-exp of all.

    Equal logits are common in bf16; which of them are kept does not depend on the layout.

    Args:
        logits: [T, Vp], any float dtype, compared and summed in fp32; contiguous in its columns.
        k: At most the real vocabulary.
        implementation: Of the normaliser, which is one read of the logits by kernel. The columns
            are found by ``torch.topk``.

    Collectives: one all-gather of int64 [T, min(k, Vp) + 1].

    Raises:
        LossError: ``k`` is not between 1 and the vocabulary, or the implementation cannot run.
    """
    check_implementation("top_log_probs", implementation)
    if not 1 <= k <= shard.vocab_size:
        raise LossError(
            "no such number of most probable tokens",
            got=k,
            expected=f"1 to {shard.vocab_size}, the vocabulary",
        )
    logits = logits.detach()
    statistics = row_statistics(logits, shard, with_column=False, implementation=implementation)
    width = min(k, shard.width)
    packed = pack_pair(statistics.peak[0].float(), statistics.total[0].float())
    local = torch.cat([_local_keys(logits, width, shard), packed[:, None]], dim=-1)
    everywhere = gather_columns(local, shard.group)
    everywhere = everywhere.unflatten(-1, (group_size(shard.group), width + 1))
    keys = everywhere[..., :width].flatten(1).topk(k, dim=-1).values
    peak, total = unpack_pair(everywhere[..., width])
    return TopLogProbs(key_columns(keys), key_values(keys), _merged(peak, total))


def _local_keys(logits: torch.Tensor, width: int, shard: VocabShard) -> torch.Tensor:
    """int64 [T, width]: this rank's largest keys, ``NO_KEY`` where it has fewer real columns."""
    ids = torch.arange(shard.start, shard.stop, device=logits.device)
    excluded = shard.excluded_columns(logits.device)
    local = torch.empty(len(logits), width, dtype=torch.int64, device=logits.device)
    for rows in row_slices(*logits.shape, device=logits.device):
        keys = sort_keys(logits[rows], ids)
        if excluded is not None:
            keys.masked_fill_(excluded, NO_KEY)
        local[rows] = keys.topk(width, dim=-1).values
    return local


def _merged(peak: torch.Tensor, total: torch.Tensor) -> LogSumExp:
    """Log-sum-exp [T] from every shard's [T, ranks], the same sums on every rank."""
    # A shard of padding alone has total 0; its peak must not win over negative logits.
    peak = peak.masked_fill(total == 0, -torch.inf)
    top = peak.amax(dim=-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return LogSumExp(top, (total * torch.exp(peak - top[:, None])).sum(dim=-1).log_())

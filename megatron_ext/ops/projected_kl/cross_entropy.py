"""Cross-entropy of the rows that a projected KL reads anyway. T rows, Vp local columns."""

from __future__ import annotations

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, scaled_logits
from megatron_ext.ops.projected_kl.values import WeightedLabels


def label_columns(label: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """int64 [T]: this rank's column of each label, -1 where another rank has it or none."""
    column = label - shard.start
    return column.masked_fill((column < 0) | (column >= shard.valid_width), -1)


def token_losses(
    logits: torch.Tensor,
    column: torch.Tensor,
    label: torch.Tensor,
    lse: LogSumExp,
    shard: VocabShard,
) -> torch.Tensor:
    """``lse - z[label]`` [T]; 0 for negative labels, NaN for those beyond the vocabulary.

    One all-reduce of [T].
    """
    picked = logits.detach().gather(-1, column.clamp(min=0)[:, None])[:, 0].to(lse.peak.dtype)
    picked = all_reduce_sum(picked.masked_fill_(column < 0, 0.0), shard.group)
    loss = (lse.peak - picked).add_(lse.log_sum)
    return loss.masked_fill_(label >= shard.vocab_size, torch.nan).masked_fill_(label < 0, 0.0)


def add_label_gradient_(
    out: torch.Tensor,
    logits: torch.Tensor,
    lse: LogSumExp,
    column: torch.Tensor,
    term: WeightedLabels,
    rows: torch.Tensor,
    excluded: torch.Tensor | None,
) -> None:
    """Add ``weight_i (softmax(z_i) - onehot(label_i))`` to ``out`` in place.

    Args:
        out: [T', Vp] in the accumulation dtype.
        logits: [T', Vp] of ``rows``.
        lse: [T] at temperature 1.
        column: int64 [T] from ``label_columns``.
        rows: int64 [T'].
    """
    weight = term.weight[rows].to(out.dtype).masked_fill(term.label[rows] < 0, 0.0)[:, None]
    scaled = scaled_logits(logits, 1.0, excluded)
    scaled.sub_(lse.peak[rows, None]).sub_(lse.log_sum[rows, None])
    out.add_(scaled.exp_().mul_(weight).masked_fill_(weight == 0, 0.0))
    place = column[rows, None]
    out.scatter_add_(-1, place.clamp(min=0), weight.neg().masked_fill(place < 0, 0.0))

"""Cross-entropy and its gradient without a graph. T rows, Vp local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.row_sums import (
    ExpSums,
    local_column,
    merge_exp_sums,
    merge_top_columns,
    token_exp_sums,
    token_log_probs,
)
from megatron_ext.ops.softmax_statistics import row_statistics
from megatron_ext.ops.token_likelihood import RowGradient, write_token_gradient


class CrossEntropy(NamedTuple):
    """What is known of each row [T], replicated over the group."""

    row_loss: torch.Tensor
    """-log p(label) in nats, fp32 (fp64 for fp64 logits); 0 where there is no label or the row has
    the scale 0, NaN for a label beyond the vocabulary."""

    top_column: torch.Tensor
    """int64: global column of the largest logit, the first of equals."""


def evaluate_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    grad_scale: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> CrossEntropy:
    """Cross-entropy of each row, and its gradient into memory of the caller's.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns.
        labels: int64 [T]; a negative one is none.
        grad_scale: [T], what each ``row_loss`` will get; None: 1. Rows without a label or at 0 are
            not read.
        gradient: [T, Vp] of the logits' dtype, or the logits themselves; d(grad_scale . row_loss) /
            d logits is written to it, with exactly 0 in rows that are not read and in padding.

    Collectives: two all-reduces of [2 T] and one of [T], 24 T bytes in fp32 and int64. Bytes of a
    row of Vp logits of b bytes by kernel: b Vp, with a gradient 3 b Vp.
    """
    read = labels >= 0 if grad_scale is None else (labels >= 0) & (grad_scale != 0)
    column = local_column(labels, shard)
    statistics = row_statistics(
        logits, shard, temperature=temperature, read=read, implementation=implementation
    )
    local = ExpSums(statistics.peak[0], statistics.total[0])
    whole, token = merge_exp_sums([local, token_exp_sums(logits, column, temperature)], shard)
    (top_column,) = merge_top_columns([statistics.column], [local], [whole], [shard])
    log_prob = token_log_probs(token, whole, labels, shard).masked_fill_(~read, 0.0)
    if gradient is not None:
        weight = torch.ones_like(log_prob) if grad_scale is None else grad_scale.to(log_prob.dtype)
        arrives = RowGradient(column, -weight.masked_fill(~read, 0.0), whole)
        write_token_gradient(
            logits.detach(),
            None,
            arrives,
            shard,
            gradient,
            temperature=temperature,
            implementation=implementation,
        )
    return CrossEntropy(log_prob.neg_(), top_column)

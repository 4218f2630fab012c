"""Rows with a label: their columns, weights, sums and losses. T rows, Vp local columns."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, accumulation_dtype
from megatron_ext.ops.chunk_rows import ExpSums, local_column, token_exp_sums, token_log_probs
from megatron_ext.ops.launch import Implementation, small_block, uses_triton

_BLOCK: Final = 1024


class LabelRows(NamedTuple):
    """Numbers of each row [T] on this rank."""

    column: torch.Tensor
    """int64: this rank's column of the label, -1 where it has none."""

    read: torch.Tensor
    """bool: rows with a label and a weight that is not 0."""

    weight: torch.Tensor
    """Gradient that the label's loss gets, in the accumulation dtype; 0 where not read."""


def label_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    weight: torch.Tensor | float,
    into: ExpSums,
    *,
    temperature: float = 1.0,
    implementation: Implementation = "auto",
) -> LabelRows:
    """Look labels up; no graph, no collectives. By kernel one launch.

    Args:
        logits: [T, Vp]
        labels: int64 [T] over all shards, negative for none.
        weight: [T], or that of all labels.
        into: Memory [T] of the label's logit over the temperature, as a sum of one column.
    """
    dtype = accumulation_dtype(logits.dtype)
    if not uses_triton(implementation, logits):
        column = local_column(labels, shard)
        for memory, part in zip(into, token_exp_sums(logits, column, temperature), strict=True):
            memory.copy_(part)
        if not isinstance(weight, torch.Tensor):
            weight = torch.full_like(labels, weight, dtype=dtype)
        read = (labels >= 0) & (weight != 0)
        return LabelRows(column, read, weight.to(dtype).masked_fill(~read, 0.0))
    from megatron_ext.ops.label_kernels import label_rows_kernel

    rows, labels, own, common = len(labels), labels.contiguous(), None, 0.0
    if isinstance(weight, torch.Tensor):
        own = weight.float().contiguous()
    else:
        common = float(weight)
    out = LabelRows(
        torch.empty_like(labels),
        torch.empty_like(labels, dtype=torch.bool),
        torch.empty_like(labels, dtype=dtype),
    )
    if rows:
        block = small_block(rows, _BLOCK)
        label_rows_kernel[(-(-rows // block),)](
            logits,
            logits.stride(0),
            labels,
            own,
            common,
            shard.start,
            shard.valid_width,
            rows,
            temperature,
            *out,
            *into,
            BLOCK=block,
        )
    return out


def label_losses(
    token: LogSumExp,
    whole: LogSumExp,
    labels: torch.Tensor,
    read: torch.Tensor | None,
    shard: VocabShard,
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Cross-entropy [T] of labels from merged sums, 0 of rows that are not read, NaN of a label
    beyond the vocabulary. By kernel one launch.

    Args:
        read: bool [T], rows with a label; None: all of them.
    """
    if token.peak.dtype != torch.float32 or not uses_triton(implementation, token.peak):
        log_prob = token_log_probs(token, whole, labels, shard)
        loss = log_prob.neg_()
        return loss if read is None else loss.masked_fill_(~read, 0.0)
    from megatron_ext.ops.label_kernels import label_losses_kernel

    rows = len(labels)
    loss = token.peak.new_empty(rows)
    if rows:
        block = small_block(rows, _BLOCK)
        label_losses_kernel[(-(-rows // block),)](
            *token, *whole, labels.contiguous(), read, shard.vocab_size, rows, loss, BLOCK=block
        )
    return loss

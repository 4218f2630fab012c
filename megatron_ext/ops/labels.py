"""Labels of rows: their columns, weights, cross-entropy, and its part of a gradient.

T rows, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, accumulation_dtype
from megatron_ext.ops.chunk_rows import (
    ChunkedLogits,
    ExpSums,
    local_column,
    merge_top_columns,
    token_exp_sums,
    token_log_probs,
)
from megatron_ext.ops.launch import Implementation, small_block, uses_triton
from megatron_ext.ops.softmax_statistics import row_statistics

_BLOCK: Final = 1024
"""Rows that a program looks up."""


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
    from megatron_ext.ops.sum_kernels import label_rows_kernel

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
    from megatron_ext.ops.sum_kernels import label_losses_kernel

    rows = len(labels)
    loss = token.peak.new_empty(rows)
    if rows:
        block = small_block(rows, _BLOCK)
        label_losses_kernel[(-(-rows // block),)](
            *token, *whole, labels.contiguous(), read, shard.vocab_size, rows, loss, BLOCK=block
        )
    return loss


class LabelTerm(NamedTuple):
    """Cross-entropy of rows' labels at temperature 1, as their gradient needs it."""

    label: torch.Tensor
    """int64 [T] over all shards, negative for none."""

    column: torch.Tensor
    """int64 [T]: this rank's column of the label, -1 where another rank has it."""

    weight: torch.Tensor
    """[T] upstream gradient, 0 where there is no label. A row at 0 gets none, whatever it holds."""

    whole: LogSumExp
    """[T] over all columns of all shards."""

    numbers: torch.Tensor | None = None
    """fp32 [3, T] of ``whole`` and ``weight``, where a kernel made them."""

    def gradient(self, logits: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Gradient in this rank's columns ``logits`` [T', Vp] of ``rows``, which it overwrites.

        Padding of ``logits`` is -inf. A row of weight 0 gets 0.
        """
        grad = self.whole.normalise_(logits, rows).exp_()
        weight = self.weight[rows, None].to(grad.dtype)
        grad.mul_(weight).masked_fill_(weight == 0, 0.0)
        column = self.column[rows, None]
        return grad.scatter_add_(-1, column.clamp(min=0), weight.neg().masked_fill(column < 0, 0.0))


class RowLabels(NamedTuple):
    """Labels whose cross-entropy at temperature 1 is evaluated with an operation."""

    labels: torch.Tensor
    """int64 [T] over all shards, negative for none. One beyond the vocabulary has a loss of NaN."""

    grad_scale: torch.Tensor | float = 1.0
    """[T], the upstream gradient of each label's loss, or that of all."""

    def sums(self, temperature: float) -> int:
        """Number of sums [T] that ``look_up`` fills beside an operation at this temperature."""
        return 1 if temperature == 1.0 else 2

    def look_up(
        self, side: ChunkedLogits, into: Sequence[ExpSums], *, implementation: Implementation
    ) -> LabelRows:
        """Look the labels up, and fill the logits of labels and, where it is asked for, the sums
        of rows at temperature 1, which reads them. No collectives."""
        logits = side.logits.detach()
        for place in into[1:]:
            row_statistics(
                logits, side.shard, with_column=False, into=place, implementation=implementation
            )
        return label_rows(
            logits,
            self.labels,
            side.shard,
            self.grad_scale,
            into[0],
            implementation=implementation,
        )


class LabelledRows(NamedTuple):
    """Cross-entropy of a model's labels, the same on every rank but for ``term.column``."""

    term: LabelTerm

    loss: torch.Tensor
    """[T], 0 where there is no label or it has no weight."""

    top_column: torch.Tensor
    """int64 [T]: global column of the largest logit, the first of equals."""

    @classmethod
    def of(
        cls,
        side: ChunkedLogits,
        labels: torch.Tensor,
        found: LabelRows,
        local: tuple[torch.Tensor, ExpSums],
        merged: Sequence[LogSumExp],
        *,
        implementation: Implementation,
    ) -> LabelledRows:
        """Evaluate labels that were looked up. One all-reduce of int64 [T].

        Args:
            local: This rank's columns of the largest logits, and the sums of all its columns.
            merged: Sums of all columns over all shards at the operation's temperature, logits of
                labels and, where the temperature is not 1, sums at temperature 1.
        """
        column, sums = local
        (top_column,) = merge_top_columns([column], [sums], merged[:1], [side.shard])
        whole = merged[2] if len(merged) > 2 else merged[0]
        loss = label_losses(
            merged[1], whole, labels, found.read, side.shard, implementation=implementation
        )
        return cls(LabelTerm(labels, found.column, found.weight, whole), loss, top_column)

"""What the rows of two models are compared by. T rows, Vp local columns, C singles, H chains."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard
from megatron_ext.ops.divergence import DivergenceOptions
from megatron_ext.ops.partition_kl.chains import Chains, SingleRows
from megatron_ext.ops.partition_kl.shared_columns import SharedColumns


class PartitionPlan(NamedTuple):
    """What is compared in one call, and how."""

    singles: SingleRows
    """Rows of chunks of one token a side."""

    shared: SharedColumns
    """The tokens over which these are compared."""

    chains: Chains
    """Rows and completions of the other chunks. No student row is in two chunks."""

    counted: torch.Tensor
    """bool [H]: chains to look at; the others have a divergence of 0."""

    student_shard: VocabShard
    teacher_shard: VocabShard
    options: DivergenceOptions = DivergenceOptions()


class TokenTerm(NamedTuple):
    """Cross-entropy of the student's labels at temperature 1, and its gradient's weights."""

    label: torch.Tensor
    """int64 [T] over all shards, negative for none."""

    column: torch.Tensor
    """int64 [T]: this rank's column of the label, -1 where it has none."""

    weight: torch.Tensor
    """fp32 [T], 0 where there is no label. A row at 0 gets no gradient, whatever it holds."""

    whole: LogSumExp
    """[T] over all columns."""

    def gradient(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Of this rank's columns ``logits`` [T', Vp] of ``rows``, -inf in padding; overwrites them.

        The whole row is finite where its weight is 0.
        """
        grad = LogSumExp(self.whole.peak[rows], self.whole.log_sum[rows]).normalise_(
            logits, slice(None)
        )
        weight = self.weight[rows].to(grad.dtype)[:, None]
        grad.exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        column = self.column[rows, None]
        return grad.scatter_add_(-1, column.clamp(min=0), weight.neg().masked_fill(column < 0, 0.0))

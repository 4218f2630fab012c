"""The gradient of all rows but those of singles. T rows, Vp local columns, R rows of chains.

N chosen columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, scaled_logits
from megatron_ext.ops.launch import ROW_CONFIGS, fitting_config
from megatron_ext.ops.partition_kl.chain_chunks import ChosenLogits
from megatron_ext.ops.partition_kl.plan import TokenTerm
from megatron_ext.ops.partition_kl.single_kernels import token_numbers
from megatron_ext.ops.partition_kl.split_statistics import RowGroup, RowSplit


class ChainGradient(NamedTuple):
    """How the student's rows of chains and of no chunk get their gradients."""

    split: RowSplit
    rest: LogSumExp
    """[R] of the columns that are not chosen, over all shards."""

    grads: ChosenLogits
    """Of the chosen logits [N] and of ``rest`` [R]."""

    picked: LogSumExp
    """[N] the chosen logits, over all shards."""

    tokens: TokenTerm | None

    def finite_rest(self) -> LogSumExp:
        """``rest`` with 0 where no column is left: those are all -inf, and -inf - -inf is NaN."""
        gone = self.rest.log_sum == -torch.inf
        return LogSumExp(self.rest.peak, self.rest.log_sum.masked_fill(gone, 0.0))

    def chosen(self) -> torch.Tensor:
        """[N] gradients of the chosen logits, those of their labels' cross-entropy included."""
        if self.tokens is None:
            return self.grads.chosen
        row = self.split.chosen.at_rows()
        whole, weight = self.tokens.whole, self.tokens.weight[row]
        log_prob = (self.picked.peak - whole.peak[row]) + self.picked.log_sum - whole.log_sum[row]
        hit = self.split.chosen.column == self.tokens.label[row]
        grad = (log_prob.exp() - hit.to(log_prob.dtype)) * weight
        return self.grads.chosen + grad.masked_fill_(weight == 0, 0.0)


def write_other_rows_(
    gradient: torch.Tensor, logits: torch.Tensor, chains: ChainGradient, shard: VocabShard
) -> None:
    """Write all rows of ``gradient`` [T, Vp] but those of singles; waits for the device."""
    chosen, value = chains.split.chosen, chains.chosen()
    rest = chains.finite_rest()
    group = chains.split.chains()
    for part in group.slices(shard.width):
        others = _scaled(logits, group, part, shard, chosen.mask(part, shard.width))
        weight = chains.grads.rest[part, None]
        grad = rest.normalise_(others, part).exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        if chains.tokens is not None:
            scaled = _scaled(logits, group, part, shard, None)
            token = chains.tokens.gradient(scaled, group.rows[part])
            grad.add_(token.masked_fill_(chosen.mask(part, shard.width), 0.0))
        entries = chosen.entries(part)
        column = chosen.local[entries]
        here = column >= 0
        place = (chosen.place[entries] - part.start)[here]
        grad[place, column[here]] = value[entries][here].to(grad.dtype)
        gradient[group.rows[part]] = grad.to(gradient.dtype)
    unused = chains.split.unused()
    if chains.tokens is None:
        gradient[unused.rows] = 0.0
        return
    for part in unused.slices(shard.width):
        scaled = _scaled(logits, unused, part, shard, None)
        token = chains.tokens.gradient(scaled, unused.rows[part])
        gradient[unused.rows[part]] = token.to(gradient.dtype)


def _scaled(
    logits: torch.Tensor,
    group: RowGroup,
    part: slice,
    shard: VocabShard,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Logits [R', Vp] of some rows in the accumulation dtype, -inf in padding and ``hidden``."""
    padding = shard.excluded_columns(logits.device)
    scaled = scaled_logits(logits[group.rows[part]], 1.0, padding)
    return scaled if hidden is None else scaled.masked_fill_(hidden, -torch.inf)


def write_other_rows_by_kernel_(
    gradient: torch.Tensor, logits: torch.Tensor, chains: ChainGradient, shard: VocabShard
) -> None:
    """``write_other_rows_`` by kernels: rows in one pass, then their chosen columns."""
    from megatron_ext.ops.partition_kl.triton_kernels import (
        other_rows_kernel,
        store_entries_kernel,
    )

    rows, chosen, tokens = len(logits), chains.split.chosen, chains.tokens
    if not rows:
        return
    parts = torch.stack([*chains.finite_rest(), chains.grads.rest]).float()
    rests = parts.new_zeros(3, rows).index_copy_(1, chosen.row, parts)
    config = fitting_config(ROW_CONFIGS[0], shard.width)
    other_rows_kernel[(rows,)](
        logits,
        chains.split.of_row,
        rests,
        None if tokens is None else tokens.column,
        None if tokens is None else token_numbers(tokens),
        gradient,
        logits.stride(0),
        gradient.stride(0),
        shard.valid_width,
        shard.width,
        rows,
        HAS_LABELS=tokens is not None,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
    count, block = len(chosen.column), 256
    if count:
        store_entries_kernel[(-(-count // block),)](
            gradient,
            chosen.at_rows(),
            chosen.local,
            chains.chosen().float().contiguous(),
            gradient.stride(0),
            count,
            BLOCK=block,
        )

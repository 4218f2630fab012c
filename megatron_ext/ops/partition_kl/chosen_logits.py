"""Chosen columns of a row and the mass of all others, over vocabulary shards.

T rows, Vp local columns, R chosen rows, N chosen columns.
"""

from __future__ import annotations

import torch

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    scaled_logits,
)
from megatron_ext.ops.partition_kl.chains import ChosenColumns


def local_chosen(
    logits: torch.Tensor, chosen: ChosenColumns, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of the chosen logits and of the mass of the other columns.

    Args:
        logits: [T, Vp], any float dtype.

    Returns:
        Logits [N], 0 where another rank has them; peak and sum of ``exp(logit - peak)`` [R] over
        the real columns that are not chosen. No collectives.
    """
    column, here = _local_columns(chosen, shard)
    dtype = accumulation_dtype(logits.dtype)
    picked = logits.detach()[chosen.row[chosen.place], column].to(dtype)
    peak, total = torch.empty(2, len(chosen.row), dtype=dtype, device=logits.device)
    excluded = shard.excluded_columns(logits.device)
    for rows in row_slices(len(chosen.row), logits.shape[-1], device=logits.device):
        others = _others(logits, chosen, rows, column, here, excluded)
        top = others.amax(dim=-1)
        peak[rows] = top.masked_fill(top == -torch.inf, 0.0)
        total[rows] = others.sub_(peak[rows, None]).exp_().sum(dim=-1)
    return torch.where(here, picked, 0.0), peak, total


def add_chosen_gradient_(
    out: torch.Tensor,
    logits: torch.Tensor,
    chosen: ChosenColumns,
    shard: VocabShard,
    rest: LogSumExp,
    grad_chosen: torch.Tensor,
    grad_rest: torch.Tensor,
) -> None:
    """Write the gradient of the chosen rows into ``out`` [T, Vp]; no collectives.

    Args:
        rest: log-sum-exp [R] of the columns not chosen, over all shards.
        grad_chosen: [N] gradient of the chosen logits.
        grad_rest: [R] gradient of ``rest``. A row whose gradients are all 0 is not looked at.
    """
    column, here = _local_columns(chosen, shard)
    excluded = shard.excluded_columns(logits.device)
    # Without a column left, log_sum is -inf and so are all logits: their difference is NaN.
    rest = LogSumExp(rest.peak, rest.log_sum.masked_fill(rest.log_sum == -torch.inf, 0.0))
    grad_chosen = torch.where(here, grad_chosen, 0.0)
    for rows in row_slices(len(chosen.row), logits.shape[-1], device=logits.device):
        others = _others(logits, chosen, rows, column, here, excluded)
        weight = grad_rest[rows, None]
        grad = rest.normalise_(others, rows).exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        part = _entries(chosen, rows)
        place = chosen.place[part] - rows.start
        grad.index_put_((place, column[part]), grad_chosen[part], accumulate=True)
        out[chosen.row[rows]] = grad.to(out.dtype)


def _local_columns(chosen: ChosenColumns, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Local column [N], 0 where it is not ``here``, and whether it is this rank's [N] bool."""
    column = chosen.column - shard.start
    here = (column >= 0) & (column < shard.valid_width) & (chosen.column >= 0)
    return torch.where(here, column, 0), here


def _entries(chosen: ChosenColumns, rows: slice) -> slice:
    return slice(chosen.pointers[rows.start], chosen.pointers[rows.stop])


def _others(
    logits: torch.Tensor,
    chosen: ChosenColumns,
    rows: slice,
    column: torch.Tensor,
    here: torch.Tensor,
    excluded: torch.Tensor | None,
) -> torch.Tensor:
    """Logits of some of the chosen rows, -inf in padding and in the chosen columns."""
    others = scaled_logits(logits[chosen.row[rows]], 1.0, excluded)
    part = _entries(chosen, rows)
    # Adding 0 where the column is another rank's: selecting would make the host wait.
    hide = torch.where(here[part], -torch.inf, 0.0).to(others.dtype)
    return others.index_put_((chosen.place[part] - rows.start, column[part]), hide, accumulate=True)

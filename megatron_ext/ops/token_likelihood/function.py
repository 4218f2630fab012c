"""What is likely next, in two numbers a row, for two models. T rows, Vp local columns.

Equations are in the README; ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    local_log_sum_exp,
    merge_log_sum_exp,
    scaled_logits,
)


class ModelRows(NamedTuple):
    """One model's rows and what is asked of them."""

    logits: torch.Tensor
    """[T, Vp], any float dtype."""

    token_id: torch.Tensor
    """int64 [T]; negative: not asked."""

    members: torch.Tensor | None
    """bool [Vp], this rank's columns of a set of tokens; None: not asked. Padding is no member."""

    shard: VocabShard


class TokenLikelihood(NamedTuple):
    """[T] each, replicated over the group."""

    log_prob: torch.Tensor
    """log p of the row's token; 0 where not asked, NaN beyond the vocabulary."""

    log_mass: torch.Tensor
    """log p of any member of the set, -inf where all of them are masked; 0 where not asked."""


def token_likelihood(
    student: ModelRows, teacher: ModelRows | None = None
) -> tuple[TokenLikelihood, TokenLikelihood | None]:
    """Log-probabilities of the rows' tokens and log-masses of the models' sets of tokens.

    Each block of logits is read once for all its numbers, with a peak of its own for the set, so
    that a mass of exp(-1e4) still has its logarithm.

    Args:
        student: Its logits are the only tensor with a gradient.
        teacher: None where its numbers are known. Its shard has the student's group.

    Returns:
        fp32 (fp64 where the student's logits are). Forward: three all-reduces, two of
        [2 (Ts + Tt)] and one of [Ts + Tt]. Backward: none; keeps the student's logits and vectors.
        A row whose gradients are 0 gets none, whatever it holds.
    """
    sides = [student] if teacher is None else [student, teacher]
    log_prob, log_mass, *others = _TokenLikelihood.apply(student.logits, sides)
    known = TokenLikelihood(*others) if others else None
    return TokenLikelihood(log_prob, log_mass), known


class _TokenLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student_logits: torch.Tensor, sides: Sequence[ModelRows]
    ) -> tuple[torch.Tensor, ...]:
        statistics = _merged_statistics(sides)
        picked = _picked_logits(sides)
        outputs: list[torch.Tensor] = []
        for side, lse, logit in zip(sides, statistics, picked, strict=True):
            whole, members = (LogSumExp(*parts) for parts in zip(*lse, strict=True))
            log_prob = (logit - whole.peak).sub_(whole.log_sum)
            log_prob.masked_fill_(side.token_id >= side.shard.vocab_size, torch.nan)
            outputs.append(log_prob.masked_fill_(side.token_id < 0, 0.0))
            log_mass = (members.peak - whole.peak).add_(members.log_sum).sub_(whole.log_sum)
            outputs.append(torch.zeros_like(log_mass) if side.members is None else log_mass)
        student = sides[0]
        ctx.save_for_backward(student_logits, *statistics[0], student.token_id)
        ctx.members, ctx.shard = student.members, student.shard
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: torch.Tensor, grad_log_mass: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, None]:
        logits, peak, log_sum, token_id = ctx.saved_tensors
        whole, members = (LogSumExp(*parts) for parts in zip(peak, log_sum, strict=True))
        excluded = ctx.shard.excluded_columns(logits.device)
        outside = _outside(ctx.members, ctx.shard)
        on_token = grad_log_prob.masked_fill(token_id < 0, 0.0)
        on_mass = grad_log_mass if outside is not None else torch.zeros_like(grad_log_mass)
        here, column = _local_column(token_id, ctx.shard)
        picked = torch.where(here, on_token, 0.0)[:, None]
        unused = ((on_token == 0) & (on_mass == 0))[:, None]
        total = (on_token + on_mass)[:, None]
        out = torch.empty_like(logits)
        for rows in row_slices(*logits.shape, device=logits.device):
            scaled = scaled_logits(logits[rows], 1.0, excluded)
            grad = whole.normalise_(scaled, rows).exp_().mul_(-total[rows])
            if outside is not None:
                inside = scaled_logits(logits[rows], 1.0, outside)
                shares = members.normalise_(inside, rows).exp_().mul_(on_mass[rows, None])
                grad.add_(shares.masked_fill_(on_mass[rows, None] == 0, 0.0))
            grad.scatter_add_(-1, column[rows, None], picked[rows])
            out[rows] = grad.masked_fill_(unused[rows], 0.0)
        return out, None


def _merged_statistics(sides: Sequence[ModelRows]) -> list[LogSumExp]:
    """Log-sum-exps [2, T] of each side: over all columns, and over the set. Two all-reduces."""
    dtype = accumulation_dtype(sides[0].logits.dtype)
    local = [_local_statistics(side, dtype) for side in sides]
    peaks, totals = (torch.cat(parts, dim=-1) for parts in zip(*local, strict=True))
    merged = merge_log_sum_exp(peaks, totals, sides[0].shard.group)
    split = (part.split(_lengths(sides), dim=-1) for part in merged)
    return [LogSumExp(*parts) for parts in zip(*split, strict=True)]


def _local_statistics(side: ModelRows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Peaks and sums [2, T] of this rank's columns."""
    excluded = side.shard.excluded_columns(side.logits.device)
    outside = _outside(side.members, side.shard)
    peaks, totals = torch.zeros(2, 2, side.logits.shape[0], dtype=dtype, device=side.logits.device)
    for rows in row_slices(*side.logits.shape, device=side.logits.device):
        block = side.logits[rows]
        peaks[0, rows], totals[0, rows] = local_log_sum_exp(block, 1.0, excluded)
        if outside is not None:
            peaks[1, rows], totals[1, rows] = local_log_sum_exp(block, 1.0, outside)
    return peaks, totals


def _picked_logits(sides: Sequence[ModelRows]) -> list[torch.Tensor]:
    """Logits [T] of each side's tokens, 0 where not asked. One all-reduce."""
    dtype = accumulation_dtype(sides[0].logits.dtype)
    found = []
    for side in sides:
        here, column = _local_column(side.token_id, side.shard)
        logit = side.logits.detach().gather(-1, column[:, None])[:, 0]
        found.append(torch.where(here, logit.to(dtype), 0.0))
    total = all_reduce_sum(torch.cat(found), sides[0].shard.group)
    return list(total.split(_lengths(sides)))


def _lengths(sides: Sequence[ModelRows]) -> list[int]:
    return [side.logits.shape[0] for side in sides]


def _local_column(token_id: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each row's token is one of this rank's, and its local column, 0 where it is not."""
    column = token_id - shard.start
    here = (column >= 0) & (column < shard.valid_width)
    return here, torch.where(here, column, 0)


def _outside(members: torch.Tensor | None, shard: VocabShard) -> torch.Tensor | None:
    return None if members is None else shard.excluded_columns(members.device, members)

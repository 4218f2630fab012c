"""Chunks of one token a side, compared over the shared vocabulary and a rest.

T rows, Vps Vpt local columns, V student columns over all shards, N shared tokens, C chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import group_size, sum_columns
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    local_argmax,
    scaled_logits,
)
from megatron_ext.ops.divergence import Divergence, divergence_terms


class SharedColumns(NamedTuple):
    """The shared tokens as this rank's columns see them."""

    student: torch.Tensor
    """bool [Vps]"""

    teacher: torch.Tensor
    """bool [Vpt]"""

    teacher_column: torch.Tensor
    """int64 [V]: this rank's column for each student token, negative where it has none."""


def shared_columns(
    common_student: torch.Tensor,
    common_teacher: torch.Tensor,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
) -> SharedColumns:
    """Cut pairs of global ids, int64 [N] each, to this rank's columns."""
    total = student_shard.width * group_size(student_shard.group)
    local = common_teacher - teacher_shard.start
    here = (local >= 0) & (local < teacher_shard.valid_width)
    column = torch.full((total,), -1, dtype=torch.int64, device=local.device)
    column[common_student] = torch.where(here, local, -1)
    return SharedColumns(
        _mask(common_student, student_shard), _mask(common_teacher, teacher_shard), column
    )


def _mask(ids: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """bool [Vp]: columns of this shard that are among ``ids``."""
    local = ids - shard.start
    outside = (local < 0) | (local >= shard.width)
    mask = torch.zeros(shard.width + 1, dtype=torch.bool, device=ids.device)
    # Ids of other ranks share one slot behind the columns.
    mask[torch.where(outside, shard.width, local)] = True
    return mask[:-1]


class PartitionNorm(NamedTuple):
    """What turns a row's logits into log-probabilities of its events at the temperature."""

    events: LogSumExp
    """[C] log-sum-exp of the shared tokens' logits over tau and of the rest's over tau."""

    rest: LogSumExp
    """[C] log-sum-exp of the logits that are not shared, at temperature 1."""

    log_rest: torch.Tensor
    """[C] log-probability of the rest."""


def local_norms(
    logits: torch.Tensor,
    row: torch.Tensor,
    shared: torch.Tensor,
    shard: VocabShard,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Peaks and sums [2, C] over this rank's shared columns at tau, and over the others at 1.

    Args:
        logits: [T, Vp]
        row: int64 [C]
        shared: bool [Vp]
    """
    dtype = accumulation_dtype(logits.dtype)
    peak, total = torch.empty(2, 2, len(row), dtype=dtype, device=logits.device)
    sets = (
        (temperature, shard.excluded_columns(logits.device, shared)),
        (1.0, shard.excluded_columns(logits.device, ~shared)),
    )
    for rows in row_slices(len(row), logits.shape[-1], device=logits.device):
        own = logits.detach()[row[rows]]
        for side, (tau, excluded) in enumerate(sets):
            scaled = scaled_logits(own, tau, excluded)
            top = scaled.amax(dim=-1)
            peak[side, rows] = top.masked_fill_(top == -torch.inf, 0.0)
            total[side, rows] = scaled.sub_(peak[side, rows, None]).exp_().sum(dim=-1)
    return peak, total


def partition_norm(peak: torch.Tensor, log_sum: torch.Tensor, temperature: float) -> PartitionNorm:
    """From merged peaks and logarithms of sums [2, C]: shared at tau, others at 1."""
    # A set without a column has no peak of its own.
    known = peak.masked_fill(log_sum == -torch.inf, -torch.inf)
    scale = peak.new_tensor([1.0, temperature])[:, None]
    tops = known / scale
    top = tops.amax(dim=0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    masses = (tops - top) + log_sum / scale
    log_total = torch.logsumexp(masses, dim=0)
    return PartitionNorm(
        LogSumExp(top, log_total), LogSumExp(peak[1], log_sum[1]), masses[1] - log_total
    )


class OneToOne(NamedTuple):
    """Both models' logits at the chunks of one token a side."""

    student_logits: torch.Tensor
    teacher_logits: torch.Tensor
    student_row: torch.Tensor
    """int64 [C]"""
    teacher_row: torch.Tensor
    """int64 [C]"""
    shared: SharedColumns
    student_shard: VocabShard
    teacher_shard: VocabShard
    student_norm: PartitionNorm
    teacher_norm: PartitionNorm
    temperature: float
    direction: Divergence
    mixture: float

    def slices(self) -> list[slice]:
        """Chunks a slice; equally many on every rank."""
        device = self.student_logits.device
        return list(
            row_slices(len(self.student_row), len(self.shared.teacher_column), device=device)
        )


def shared_divergence(pair: OneToOne) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of the divergences, without a graph.

    Returns:
        Sums of value and slope [2, C] over this rank's shared columns; the largest log-probability
        [2, C] of student and teacher in them; its global column [2, C]. One reduce-scatter of
        [C', V] a slice of C' chunks.
    """
    count = len(pair.student_row)
    sums = torch.zeros_like(pair.student_norm.log_rest).new_zeros(2, count)
    best, column = sums.clone(), torch.zeros_like(sums, dtype=torch.int64)
    for rows in pair.slices():
        log_q, log_p = _log_probs(pair, rows)
        terms = divergence_terms(log_p, log_q, pair.direction, pair.mixture)
        sums[0, rows], sums[1, rows] = terms.value.sum(dim=-1), terms.slope.sum(dim=-1)
        for side, values in enumerate((log_q, log_p)):
            best[side, rows], column[side, rows] = local_argmax(values, pair.student_shard)
    return sums, best, column


def add_shared_gradient_(
    out: torch.Tensor,
    pair: OneToOne,
    slope_sum: torch.Tensor,
    rest_grad: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Write the gradient of the pair's student rows into ``out`` [T, Vps].

    Args:
        slope_sum: [C] sum of dD/d log Q over all events of a chunk.
        rest_grad: [C] dD/d of the rest's logit at tau.
        weight: [C] gradient of each divergence. A chunk at 0 is not looked at.

    One reduce-scatter a slice of chunks, as in ``shared_divergence``.
    """
    excluded = pair.student_shard.excluded_columns(out.device, ~pair.shared.student)
    rest = pair.student_norm.rest
    rest = LogSumExp(rest.peak, rest.log_sum.masked_fill(rest.log_sum == -torch.inf, 0.0))
    for rows in pair.slices():
        log_q, log_p = _log_probs(pair, rows)
        slope = divergence_terms(log_p, log_q, pair.direction, pair.mixture).slope
        grad = slope.sub_(log_q.exp_().mul_(slope_sum[rows, None])).div_(pair.temperature)
        # The rest's logit over tau has the softmax of its own columns, over tau, as derivative.
        others = scaled_logits(pair.student_logits[pair.student_row[rows]], 1.0, excluded)
        within = rest.normalise_(others, rows).exp_()
        grad.add_(within.mul_(rest_grad[rows, None] / pair.temperature))
        scale = weight[rows, None]
        grad.mul_(scale).masked_fill_(scale == 0, 0.0)
        out[pair.student_row[rows]] = grad.to(out.dtype)


def _log_probs(pair: OneToOne, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Log Q and log P [C', Vps] on this rank's shared student columns, -inf on the others."""
    own = pair.student_shard.excluded_columns(pair.student_logits.device, pair.shared.student)
    log_q = pair.student_norm.events.normalise_(
        scaled_logits(pair.student_logits[pair.student_row[rows]], pair.temperature, own), rows
    )
    log_p = pair.teacher_norm.events.normalise_(
        scaled_logits(pair.teacher_logits[pair.teacher_row[rows]], pair.temperature, None), rows
    )
    column = pair.shared.teacher_column
    sent = log_p.index_select(1, column.clamp(min=0)).masked_fill_(column < 0, 0.0)
    moved = sum_columns(sent, pair.student_shard.width, pair.student_shard.group)
    moved = moved.to(log_q.dtype)
    return log_q, moved if own is None else moved.masked_fill(own, -torch.inf)

"""Softmax statistics of both models' rows, merged over shards in one exchange.

T rows, C chunks, Vps Vpt local columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    merge_log_sum_exp,
    scaled_logits,
)
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.projected_kl.sharded_projection import ShardedProjection
from megatron_ext.ops.softmax_statistics import row_statistics


class ChunkStatistics(NamedTuple):
    """In fp32 (fp64 for fp64 logits), the same on every rank."""

    student: LogSumExp
    """[Ts] of ``z / tau`` over all columns."""

    mapped: torch.Tensor
    """[Ts] ``sum_s q_i[s] row_mass[s]``: what of the row's mass W carries over."""

    teacher: LogSumExp
    """[Tt] of ``y / tau`` over the reachable columns."""

    left_out: torch.Tensor
    """[Tt] teacher's mass on the others."""

    untempered: LogSumExp | None
    """[Ts] of ``z``; ``student`` where tau is 1, None unless asked for."""


def chunk_statistics(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    projection: ShardedProjection,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    *,
    temperature: float,
    untempered: bool,
    implementation: Implementation,
) -> ChunkStatistics:
    """Read both models' logits once. No graph.

    Two all-reduces of [2 Ts + 2 Tt], and of Ts more for ``untempered`` at another temperature. One
    all-reduce of [Ts] and another read of the student unless ``projection.has_unit_rows``.
    """
    by = implementation
    sides = [
        row_statistics(
            student_logits,
            student_shard,
            temperature=temperature,
            members=projection.row_mass > 0 if projection.has_unit_rows else None,
            with_column=False,
            implementation=by,
        ),
        row_statistics(
            teacher_logits,
            teacher_shard,
            temperature=temperature,
            members=projection.reachable,
            with_column=False,
            implementation=by,
        ),
    ]
    peaks, totals = ([part for x in sides for part in x[index]] for index in (0, 1))
    if untempered and temperature != 1.0:
        plain = row_statistics(student_logits, student_shard, with_column=False, implementation=by)
        peaks.append(plain.peak[0])
        totals.append(plain.total[0])
    merged = merge_log_sum_exp(torch.cat(peaks), torch.cat(totals), student_shard.group)
    rows = [len(peak) for peak in peaks]
    parts = [LogSumExp(*pair) for pair in zip(*(x.split(rows) for x in merged), strict=True)]
    student, inside, whole, teacher = parts[:4]
    if projection.has_unit_rows:
        mapped = _log_ratio(inside, student).exp_()
    else:
        mapped = _mapped_mass(student_logits, student, projection, student_shard, temperature)
    left_out = -torch.expm1(_log_ratio(teacher, whole))
    return ChunkStatistics(
        student, mapped, teacher, left_out, (parts[4:] or [student])[0] if untempered else None
    )


def _log_ratio(part: LogSumExp, whole: LogSumExp) -> torch.Tensor:
    return (part.peak - whole.peak).add_(part.log_sum).sub_(whole.log_sum)


def _mapped_mass(
    logits: torch.Tensor,
    lse: LogSumExp,
    projection: ShardedProjection,
    shard: VocabShard,
    temperature: float,
) -> torch.Tensor:
    """``sum_s q_i[s] row_mass[s]`` of rows of any sum, [Ts]. One all-reduce."""
    excluded = shard.excluded_columns(logits.device)
    row_mass = projection.row_mass.to(lse.peak.dtype)
    out = torch.empty_like(lse.peak)
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        out[rows] = lse.normalise_(scaled, rows).exp_() @ row_mass
    return all_reduce_sum(out, shard.group)

"""Softmax statistics of both models' rows, merged over shards in one exchange.

T rows, C chunks, Vps local columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.projected_kl.carried_rows import CarriedRows, carried_rows, log_ratio
from megatron_ext.ops.projected_kl.sharded_projection import ShardedProjection
from megatron_ext.ops.softmax_statistics import row_statistics


class ChunkStatistics(NamedTuple):
    """In fp32 (fp64 for fp64 logits), the same on every rank."""

    student: LogSumExp
    """[Ts] of ``z / tau`` over all columns."""

    carried: CarriedRows
    """How the columns that W carries over are read."""

    mapped: torch.Tensor
    """[Ts] ``sum_s q_i[s] row_mass[s]`` as they are read: what of the row W carries over."""

    teacher: LogSumExp
    """[Tt] of ``y / tau`` over the reachable columns."""

    left_out: torch.Tensor
    """[Tt] teacher's mass on the others."""

    untempered: LogSumExp | None
    """[Ts] of ``z``; ``student`` where tau is 1, None unless asked for."""


def chunk_statistics(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    projection: ShardedProjection,
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
            side.logits,
            side.shard,
            temperature=temperature,
            members=members,
            with_column=False,
            implementation=by,
        )
        for side, members in ((student, projection.row_mass > 0), (teacher, projection.reachable))
    ]
    peaks, totals = ([part for x in sides for part in x[index]] for index in (0, 1))
    if untempered and temperature != 1.0:
        plain = row_statistics(student.logits, student.shard, with_column=False, implementation=by)
        peaks.append(plain.peak[0])
        totals.append(plain.total[0])
    merged = merge_log_sum_exp(torch.cat(peaks), torch.cat(totals), student.shard.group)
    rows = [len(peak) for peak in peaks]
    parts = [LogSumExp(*pair) for pair in zip(*(x.split(rows) for x in merged), strict=True)]
    own, inside, whole, reached = parts[:4]
    carried = carried_rows(own, inside, student.rows)
    if projection.has_unit_rows:
        mapped = log_ratio(inside, carried.lse).exp_()
    else:
        mapped = _mapped_mass(student, carried.lse, projection, temperature)
    left_out = -torch.expm1(log_ratio(reached, whole))
    plain_rows = (parts[4:] or [own])[0] if untempered else None
    return ChunkStatistics(own, carried, mapped, reached, left_out, plain_rows)


def _mapped_mass(
    student: ChunkedLogits, lse: LogSumExp, projection: ShardedProjection, temperature: float
) -> torch.Tensor:
    """``sum_s q_i[s] row_mass[s]`` of rows of any sum, [Ts]. One all-reduce."""
    logits, shard = student.logits, student.shard
    row_mass = projection.row_mass.to(lse.peak.dtype)
    excluded = shard.excluded_columns(logits.device, row_mass > 0)
    out = torch.empty_like(lse.peak)
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        out[rows] = lse.normalise_(scaled, rows).exp_() @ row_mass
    return all_reduce_sum(out, shard.group)

"""Statistics of both models' rows, and quantities of chunks and labels computed from them.

T rows, C chunks, Vps Vpt local columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    merge_argmax,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows, local_column
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.projected_kl.operands import ShardedProjection, WeightedLabels
from megatron_ext.ops.softmax_statistics import row_statistics


class CarriedRows(NamedTuple):
    """Normalisers of the columns that W maps; README, equation 14."""

    lse: LogSumExp
    """[T] log-sum-exp of the row, or of its mapped columns in chunks that are scaled up."""

    is_scaled: torch.Tensor
    """bool [C]: chunks with at most a rounding error of every row's mass on mapped columns."""

    is_empty: torch.Tensor
    """bool [C]: chunks in which every row masks every mapped column."""


def carried_rows(whole: LogSumExp, inside: LogSumExp, rows: ChunkRows) -> CarriedRows:
    """Normalisers from the rows' sums over all columns and over mapped ones, [T]. No
    collectives."""
    share = log_ratio(inside, whole)
    largest = share.new_full((rows.chunk_count + 1,), -torch.inf)
    largest.scatter_reduce_(0, rows.slots, share, "amax")
    is_scaled = (largest > -torch.inf) & (largest.exp() < torch.finfo(share.dtype).eps)
    # Rows of no chunk are not read; a row without mapped mass has nothing to scale.
    is_scaled[-1:] = False
    scaled = is_scaled[rows.slots] & (share > -torch.inf)
    below = (share - largest[rows.slots]).masked_fill(~scaled, 0.0)
    lse = LogSumExp(
        torch.where(scaled, inside.peak, whole.peak),
        torch.where(scaled, inside.log_sum - below, whole.log_sum),
    )
    return CarriedRows(lse, is_scaled[:-1], largest[:-1] == -torch.inf)


def log_ratio(part: LogSumExp, whole: LogSumExp) -> torch.Tensor:
    """Logarithm of the share of ``part`` in ``whole``, [T]."""
    return (part.peak - whole.peak).add_(part.log_sum).sub_(whole.log_sum)


class ChunkStatistics(NamedTuple):
    """Statistics of both models' rows in fp32 (fp64 for fp64 logits), the same on every rank."""

    student: LogSumExp
    """[Ts] of ``z / tau`` over all columns."""

    carried: CarriedRows
    """Normalisers of the student's mapped columns."""

    mapped: torch.Tensor
    """[Ts] ``sum_s q_i[s] row_mass[s]``, the row's mapped mass under ``carried``."""

    teacher: LogSumExp
    """[Tt] of ``y / tau`` over the reachable columns."""

    left_out: torch.Tensor
    """[Tt] teacher's mass on columns that are not reachable."""

    untempered: LogSumExp | None
    """[Ts] of ``z``; ``student`` where tau is 1, None unless asked for."""

    top_column: torch.Tensor | None
    """int64 [Ts]: global column of the largest ``z``, the first of equals; None as above."""


class MergedSums(NamedTuple):
    """Sums of exponentials of both models' rows over all ranks."""

    peak: torch.Tensor
    """[2 Ts + 2 Tt]: of the student's rows over all columns and over mapped ones, then of the
    teacher's over all and over reachable ones; and [Ts] more where tau is not 1, over all of the
    student's at temperature 1."""

    log_sum: torch.Tensor
    """As ``peak``."""

    top_column: torch.Tensor | None
    """int64 [Ts]: global column of the largest ``z``, the first of equals; None unless asked."""

    local_columns: tuple[torch.Tensor, torch.Tensor]
    """int64 [Ts] and [Tt]: this rank's column of the largest logit; of kernels alone."""

    @property
    def parts(self) -> list[LogSumExp]:
        """Sums of each kind of row, in their order."""
        students, teachers = (len(columns) for columns in self.local_columns)
        rows = [students, students, teachers, teachers]
        if len(self.peak) > sum(rows):
            rows.append(students)
        split = (part.split(rows) for part in (self.peak, self.log_sum))
        return [LogSumExp(*pair) for pair in zip(*split, strict=True)]


def merged_sums(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    projection: ShardedProjection,
    *,
    temperature: float,
    untempered: bool,
    implementation: Implementation,
) -> MergedSums:
    """Read both models' logits once. No graph.

    Two all-reduces of [2 Ts + 2 Tt], and of Ts more for ``untempered`` at another temperature; two
    of [Ts] for its largest columns.
    """
    by, has_plain = implementation, untempered and temperature != 1.0
    lengths = [2 * len(student.logits), 2 * len(teacher.logits), has_plain * len(student.logits)]
    sums = student.logits.new_empty(2, sum(lengths), dtype=_sums_dtype(student, teacher))
    places = list(zip(*(part.split(lengths) for part in sums), strict=True))
    sides = [
        row_statistics(
            side.logits,
            side.shard,
            temperature=temperature,
            members=members,
            with_column=untempered and side is student,
            into=place,
            implementation=by,
        )
        for side, members, place in zip(
            (student, teacher), (projection.mapped, projection.reachable), places, strict=False
        )
    ]
    if has_plain:
        row_statistics(
            student.logits, student.shard, with_column=False, into=places[2], implementation=by
        )
    peak, total = sums
    merged = merge_log_sum_exp(peak, total, student.shard.group)
    top = None
    if untempered:
        own, shard = sides[0], student.shard
        top = own.column
        if shard.group is not None:
            best = own.peak[0].masked_fill(own.total[0] == 0, -torch.inf)
            top = merge_argmax(best, top + shard.start, shard.group)
    return MergedSums(*merged, top, (sides[0].column, sides[1].column))


def _sums_dtype(*sides: ChunkedLogits) -> torch.dtype:
    dtypes = [accumulation_dtype(side.logits.dtype) for side in sides]
    return torch.float64 if torch.float64 in dtypes else torch.float32


def chunk_statistics(
    sums: MergedSums,
    student: ChunkedLogits,
    projection: ShardedProjection,
    *,
    temperature: float,
    untempered: bool,
) -> ChunkStatistics:
    """What follows from the rows' sums.

    One all-reduce of [Ts] and another read of the student unless ``projection.has_unit_rows``.
    """
    student_whole, inside, whole, reached, *plain = sums.parts
    carried = carried_rows(student_whole, inside, student.rows)
    if projection.has_unit_rows:
        mapped = log_ratio(inside, carried.lse).exp_()
    else:
        mapped = mapped_mass(student, carried.lse, projection, temperature)
    left_out = -torch.expm1(log_ratio(reached, whole))
    plain_rows = (plain or [student_whole])[0] if untempered else None
    return ChunkStatistics(
        student_whole, carried, mapped, reached, left_out, plain_rows, sums.top_column
    )


def mapped_mass(
    student: ChunkedLogits, lse: LogSumExp, projection: ShardedProjection, temperature: float
) -> torch.Tensor:
    """``sum_s q_i[s] row_mass[s]`` [Ts] for projection rows of any sum. One all-reduce."""
    logits, shard = student.logits, student.shard
    row_mass = projection.row_mass.to(lse.peak.dtype)
    excluded = shard.excluded_columns(logits.device, row_mass > 0)
    out = torch.empty_like(lse.peak)
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        out[rows] = lse.normalise_(scaled, rows).exp_() @ row_mass
    return all_reduce_sum(out, shard.group)


def label_logits(logits: torch.Tensor, label: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Logit [T] of each label int64 [T], 0 of those that no rank has. One all-reduce of [T]."""
    column = local_column(label, shard)
    picked = logits.detach().gather(-1, column.clamp(min=0)[:, None])[:, 0]
    picked = picked.to(accumulation_dtype(logits.dtype))
    return all_reduce_sum(picked.masked_fill_(column < 0, 0.0), shard.group)


def token_losses(
    picked: torch.Tensor, label: torch.Tensor, lse: LogSumExp, shard: VocabShard
) -> torch.Tensor:
    """``lse - z[label]`` [T]; 0 for negative labels, NaN for those beyond the vocabulary.

    Args:
        picked: [T] from ``label_logits``.
    """
    loss = (lse.peak - picked).add_(lse.log_sum)
    return loss.masked_fill_(label >= shard.vocab_size, torch.nan).masked_fill_(label < 0, 0.0)


def add_label_gradient_(
    out: torch.Tensor,
    logits: torch.Tensor,
    lse: LogSumExp,
    column: torch.Tensor,
    term: WeightedLabels,
    rows: torch.Tensor,
    excluded: torch.Tensor | None,
) -> None:
    """Add ``weight_i (softmax(z_i) - onehot(label_i))`` to ``out`` in place.

    Args:
        out: [T', Vp] in the accumulation dtype.
        logits: [T', Vp] of ``rows``.
        lse: [T] at temperature 1.
        column: int64 [T] from ``local_column``.
        rows: int64 [T'].
    """
    weight = term.weights()[rows, None].to(out.dtype)
    scaled = scaled_logits(logits, 1.0, excluded)
    scaled.sub_(lse.peak[rows, None]).sub_(lse.log_sum[rows, None])
    out.add_(scaled.exp_().mul_(weight).masked_fill_(weight == 0, 0.0))
    place = column[rows, None]
    out.scatter_add_(-1, place.clamp(min=0), weight.neg().masked_fill(place < 0, 0.0))

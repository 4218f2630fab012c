"""Projected KL by compiled loops on a CPU, a tile of chunks at a time. README, equations 2 to 13.

T rows, C chunks, C' of a tile, D summed columns, R residual rows, X crossing columns, N entries.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp, merge_argmax
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkedLogits, local_column
from megatron_ext.ops.divergence import probability_floor
from megatron_ext.ops.divergence_loops import DIRECTIONS
from megatron_ext.ops.projected_kl import compiled_loops as compiled
from megatron_ext.ops.projected_kl.column_loops import (
    ByChunk,
    Columns,
    Labels,
    Scalars,
    Side,
    Sums,
    Work,
)
from megatron_ext.ops.projected_kl.column_plan import ColumnPlan, Segments
from megatron_ext.ops.projected_kl.kept_columns import KeptColumns, kept_columns
from megatron_ext.ops.projected_kl.operands import (
    ProjectedKLOptions,
    ProjectedValues,
    RequestedOutputs,
    ShardedProjection,
)
from megatron_ext.ops.projected_kl.statistics import ChunkStatistics
from megatron_ext.ops.row_loops import BLOCK, FlatRows, flat_rows, in_threads

_SCRATCH_BYTES: Final = 1 << 24


class CompiledEvaluation:
    """Evaluation of one call; ``run`` once."""

    def __init__(
        self,
        student: ChunkedLogits,
        teacher: ChunkedLogits,
        projection: ShardedProjection,
        statistics: ChunkStatistics,
        options: ProjectedKLOptions,
        requested: RequestedOutputs,
    ) -> None:
        if projection.plan is None:
            raise LossError("the compiled loops of projected_kl need a plan", fix="pass plan")
        self.plan, self.student, self.teacher = projection.plan, student, teacher
        self.options, self.requested = options, requested
        self.weight = projection.weight.values().detach()
        mass = student.rows.means(statistics.mapped)
        count = len(mass)
        self.mass = mass.clamp_(min=probability_floor(mass))
        self.kept = kept_columns(teacher, statistics.teacher, projection.reachable, options, "cpu")
        nothing = KeptColumns(mass[:0], mass.new_zeros(2, 0))
        threshold, rest = nothing if self.kept is None else self.kept
        self.values = ByChunk(
            mass=self.mass.numpy(),
            is_scaled=statistics.carried.is_scaled.numpy(),
            grad_scale=requested.grad_scale.float().contiguous().numpy(),
            sums=np.zeros((2, count), dtype=np.float32),
            best=np.full((2, count), -1, dtype=np.float32),
            column=np.zeros((2, count), dtype=np.int32),
            threshold=threshold.numpy(),
            rest=rest.numpy(),
            rest_slope=np.zeros(len(threshold), dtype=np.float32),
        )
        learned = np.zeros((2, 0), dtype=np.int32)
        if requested.learned is not None and requested.entry_gradient is not None:
            slot = self.plan.slot[requested.learned.column]
            learned = torch.stack([requested.learned.row.int(), slot]).numpy()
        gradient = requested.gradient
        empty = np.zeros((2, 0, 0), dtype=np.float32)
        self.work = Work(
            start=0,
            student=_side(student, statistics.student, options.temperature),
            carried_peak=statistics.carried.lse.peak.numpy(),
            carried_log_sum=statistics.carried.lse.log_sum.numpy(),
            teacher=_side(teacher, statistics.teacher, options.temperature),
            columns=_columns(self.plan, projection.row_mass, self.weight),
            crossed=empty,
            scratch=empty[0],
            residual=empty[0],
            scalars=Scalars(
                temperature=np.float32(options.temperature),
                direction=DIRECTIONS[options.direction],
                mixture=np.float32(options.mixture),
                diagnostics=options.diagnostics,
                with_dots=gradient is not None or learned.shape[1] > 0,
            ),
            by_chunk=self.values,
            dots=np.zeros((2, len(student.logits)), dtype=np.float32),
            labels=_labels(student, statistics, requested),
            plain=flat_rows(student.logits, student.shard.valid_width),
            gradient=_no_rows(student) if gradient is None else flat_rows(gradient),
            learned=learned,
        )

    def run(self) -> ProjectedValues:
        """Evaluate all chunks; the collectives are those of ``evaluate_projected_kl``."""
        count, group = self.student.rows.chunk_count, self.student.shard.group
        wide = self.plan.scratch_width + 6 * self.plan.crossing
        step = max(1, _SCRATCH_BYTES // (4 * max(wide, 1)))
        for first in range(0, count, step):
            self._tile(first, min(step, count - first))
        self._outside_chunks()
        sums = all_reduce_sum(torch.from_numpy(self.values.sums), group)
        agreement = torch.zeros(count, dtype=torch.bool)
        if self.options.diagnostics:
            best = torch.from_numpy(self.values.best)
            column = torch.from_numpy(self.values.column).long() + self.teacher.shard.start
            p_top, q_top = merge_argmax(best, column, group)
            agreement = p_top == q_top
        if self.kept is None:
            return ProjectedValues(sums[0], sums[1], agreement, torch.zeros_like(sums[0]))
        value = sums[0] + self.kept.terms(self.mass, self.options).value
        return ProjectedValues(value, sums[1], agreement, self.kept.rest[0])

    def _tile(self, first: int, count: int) -> None:
        """Evaluate ``count`` chunks from ``first`` on; two all-reduces on several shards, three
        with ``vocab_topk``."""
        plan, group = self.plan, self.student.shard.group
        work = self.work._replace(
            start=first,
            scratch=np.empty((count, len(plan.home)), dtype=np.float32),
            residual=np.empty((count, plan.residual_rows), dtype=np.float32),
        )
        columns, slopes = compiled.SUM_COLUMNS, compiled.SLOPES | compiled.VALUES
        if group is None and self.kept is None:
            self._steps(work, count, columns | slopes | compiled.GRADIENTS)
            return
        self._steps(work, count, columns)
        if plan.crossing:
            both = np.zeros((2, count, plan.crossing), dtype=np.float32)
            both[0] = work.scratch[:, : plan.crossing]
            in_threads(
                lambda a, b: compiled.crossing_means(first + a, first + b, work, both[1]), count
            )
            work = work._replace(crossed=all_reduce_sum(torch.from_numpy(both), group).numpy())
        if self.kept is not None:
            in_threads(lambda a, b: compiled.add_rests(first + a, first + b, work), count)
            self._share_rest(slice(first, first + count))
        self._steps(work, count, slopes)
        if work.scalars.with_dots:
            dots = all_reduce_sum(torch.from_numpy(work.dots), group).numpy()
            self._steps(work._replace(dots=dots), count, compiled.GRADIENTS)
            work.dots[:] = 0

    def _share_rest(self, chunks: slice) -> None:
        """Add up the masses of the columns that are compared as one over all shards."""
        assert self.kept is not None
        own = self.kept.rest[:, chunks]
        own.copy_(all_reduce_sum(own.contiguous(), self.student.shard.group))
        kept, mass = KeptColumns(self.kept.threshold[chunks], own), self.mass[chunks]
        slope = kept.terms(mass, self.options).slope
        torch.from_numpy(self.values.rest_slope)[chunks] = slope

    def _steps(self, work: Work, count: int, steps: int) -> None:
        entries = self.requested.entry_gradient
        parts: dict[int, np.ndarray] = {}

        def run(first: int, stop: int) -> None:
            part = parts[first] = np.zeros(work.learned.shape[1], dtype=np.float32)
            compiled.evaluate(work.start + first, work.start + stop, steps, work, part)

        in_threads(run, count)
        if entries is not None and steps & compiled.GRADIENTS:
            # In the order of chunks, whichever thread was first.
            for first in sorted(parts):
                entries += self.options.temperature**2 * torch.from_numpy(parts[first])

    def _outside_chunks(self) -> None:
        """Cross-entropy's gradient, or 0, of the rows of no chunk."""
        if self.requested.gradient is None:
            return
        start, work = int(self.student.rows.offsets[-1]), self.work
        in_threads(
            lambda first, stop: compiled.write_labels(
                start + first,
                start + stop,
                work.student.order,
                work.plain,
                work.labels,
                work.gradient,
            ),
            len(self.student.logits) - start,
        )


def _side(side: ChunkedLogits, lse: LogSumExp, temperature: float) -> Side:
    return Side(
        flat_rows(side.logits, side.shard.valid_width, temperature),
        side.rows.order.numpy(),
        side.rows.offsets.numpy(),
        lse.peak.numpy(),
        lse.log_sum.numpy(),
    )


def _columns(plan: ColumnPlan, row_mass: torch.Tensor, weight: torch.Tensor) -> Columns:
    residual = plan.residual[plan.residual >= 0].numpy()
    starts = np.arange(0, len(plan.partner) + BLOCK, BLOCK)
    return Columns(
        partner=plan.partner.numpy(),
        home=plan.home.numpy(),
        crossing=plan.crossing,
        by_column=_sums(plan.by_column, weight),
        by_row=_sums(plan.by_row, weight),
        residual=residual,
        residual_of_block=np.searchsorted(residual, starts).astype(np.int32),
        row_mass=row_mass.float().numpy(),
    )


def _sums(segments: Segments, weight: torch.Tensor) -> Sums:
    offsets, target, source, entry = segments[:4]
    weights = weight[entry.long()].float()
    return Sums(*(part.numpy() for part in (offsets, target, source, weights)))


def _labels(
    student: ChunkedLogits, statistics: ChunkStatistics, requested: RequestedOutputs
) -> Labels:
    if requested.cross_entropy is None or statistics.untempered is None:
        none = np.zeros(0, dtype=np.float32)
        return Labels(np.zeros(0, dtype=np.int64), none, none, none)
    return Labels(
        local_column(requested.cross_entropy.label, student.shard).numpy(),
        requested.cross_entropy.weights().float().numpy(),
        statistics.untempered.peak.numpy(),
        statistics.untempered.log_sum.numpy(),
    )


def _no_rows(student: ChunkedLogits) -> FlatRows:
    """Rows without values, of the dtype that the gradient would have."""
    return flat_rows(student.logits[:0])

"""Projected KL in plain torch, a slice of whole chunks at a time. README, equations 2 to 11.

T rows, C chunks, Vps Vpt local columns; primes are those of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import (
    all_reduce_sum,
    gather_columns,
    group_size,
    sum_columns,
)
from megatron_ext.distributed.vocab_parallel import (
    SLICE_ELEMENTS,
    LogSumExp,
    local_argmax,
    merge_argmax,
    row_slices,
)
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows, local_column
from megatron_ext.ops.divergence import ProjectedTerms, probability_floor, projected_terms
from megatron_ext.ops.projected_kl.kept_columns import kept_threshold, pool_rest
from megatron_ext.ops.projected_kl.operands import (
    ProjectedKLOptions,
    ProjectedValues,
    RequestedOutputs,
    ShardedProjection,
    entry_gradient,
)
from megatron_ext.ops.projected_kl.statistics import (
    ChunkStatistics,
    add_label_gradient_,
)


class ChunkSlice(NamedTuple):
    """Chunks ``[start, stop)`` and places of their rows in ``ChunkRows.order`` on either side."""

    chunks: slice
    student: slice
    teacher: slice
    is_scaled: bool
    """Whether one of the chunks is scaled up (``CarriedRows``)."""


class HostChunks(NamedTuple):
    """Row offsets of the chunks on the host."""

    student: list[int]
    """[C + 1] ``ChunkRows.offsets``."""

    teacher: list[int]

    scaled: list[int]
    """[C + 1] number of chunks before that are scaled up."""

    @classmethod
    def of(cls, student: ChunkRows, teacher: ChunkRows, is_scaled: torch.Tensor) -> HostChunks:
        """Copy from the device, for which it waits once."""
        scaled = torch.nn.functional.pad(is_scaled.int().cumsum(0, dtype=torch.int32), (1, 0))
        return cls(*torch.stack([student.offsets, teacher.offsets, scaled]).tolist())


def chunk_slices(
    ends: HostChunks, widths: tuple[int, int, int], device: torch.device
) -> Iterator[ChunkSlice]:
    """Cut all chunks into slices whose temporaries hold at most ``SLICE_ELEMENTS`` elements.

    Collectives run once a slice: chunks and widths must be the same on every rank. A chunk that
    alone holds more is a slice of its own.

    Args:
        ends: Offsets of all chunks.
        widths: Columns of a student row, of a teacher row, and of a chunk's temporaries.
    """
    limit, count = SLICE_ELEMENTS[device.type], len(ends.student) - 1
    start = 0
    while start < count:
        stop = start + 1
        while stop < count and _largest(ends, start, stop + 1, widths) <= limit:
            stop += 1
        yield ChunkSlice(
            slice(start, stop),
            slice(ends.student[start], ends.student[stop]),
            slice(ends.teacher[start], ends.teacher[stop]),
            ends.scaled[stop] > ends.scaled[start],
        )
        start = stop


def _largest(ends: HostChunks, start: int, stop: int, widths: tuple[int, int, int]) -> int:
    rows = [side[stop] - side[start] for side in (ends.student, ends.teacher)]
    return max(count * width for count, width in zip((*rows, stop - start), widths, strict=True))


class TorchEvaluation:
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
        self.student, self.teacher = student, teacher
        self.statistics, self.options, self.requested = statistics, options, requested
        dtype = statistics.mapped.dtype
        # The projection follows the logits: fp64 in a gradient check, else fp32.
        self.onto_teacher = projection.weight_transposed.to(dtype).t()
        self.onto_student = projection.weight.to(dtype).t()
        device = student.logits.device
        self.student_excluded = student.shard.excluded_columns(device)
        self.mapped = projection.row_mass > 0
        self.unreached = teacher.shard.excluded_columns(device, projection.reachable)
        self.sizes = student.rows.sizes().clamp(min=1).to(dtype)
        self.mass = mean_mapped_mass(statistics, student.rows)
        self.labels = None
        if requested.cross_entropy is not None:
            self.labels = local_column(requested.cross_entropy.label, student.shard)

    def run(self) -> ProjectedValues:
        """Evaluate all chunks; the collectives are those of ``evaluate_projected_kl``."""
        group = self.student.shard.group
        floats = self.mass.new_zeros(3, len(self.mass))
        agreement = torch.zeros(len(self.mass), dtype=torch.bool, device=self.mass.device)
        onto_width = self.teacher.shard.width * group_size(group)
        widths = (self.student.shard.width, self.teacher.shard.width, onto_width)
        ends = HostChunks.of(
            self.student.rows, self.teacher.rows, self.statistics.carried.is_scaled
        )
        for part in chunk_slices(ends, widths, self.mass.device):
            floats[:, part.chunks], agreement[part.chunks] = self._slice(part)
        self._write_outside_chunks(ends.student[-1])
        return ProjectedValues(floats[0], floats[1], agreement, floats[2])

    def _slice(self, part: ChunkSlice) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate a slice: value, entropy and rest [3, C'], agreement [C']; write its gradient."""
        group, options = self.student.shard.group, self.options
        rows = self.student.rows.order[part.student].long()
        slot = self.student.rows.slots[rows] - part.chunks.start
        probs = self._student_probs(part, rows)
        sizes, mass = self.sizes[part.chunks, None], self.mass[part.chunks, None]
        means = probs.new_zeros(len(sizes), probs.shape[1]).index_add_(0, slot, probs).div_(sizes)
        q = sum_columns(means @ self.onto_teacher, self.teacher.shard.width, group)
        p = self._teacher_chunks(part)

        agreement = torch.zeros(len(p), dtype=torch.bool, device=p.device)
        entropy = p.new_zeros(len(p))
        if options.diagnostics:
            entropy = -(p * p.clamp(min=probability_floor(p)).log_()).sum(dim=-1)
            best = [local_argmax(side, self.teacher.shard) for side in (p, q)]
            tops, columns = (torch.stack(x) for x in zip(*best, strict=True))
            p_top, q_top = merge_argmax(tops, columns, group)
            agreement = p_top == q_top
        terms, pooled, rest_mass = self._compare(p, q, mass)
        sums = torch.stack([terms.value.sum(dim=-1), terms.centre.sum(dim=-1), entropy])
        value, centre, entropy = all_reduce_sum(sums, group)
        value, centre = value + pooled[0], centre + pooled[1]
        if options.direction == "forward":
            # Exact but for rounding and for columns below the floor.
            centre = torch.full_like(centre, -1.0)
        if self.requested.gradient is not None or self.requested.entry_gradient is not None:
            slope = (terms.slope - centre[:, None]).div_(mass)
            slope = gather_columns(slope, group)[:, : self.onto_teacher.shape[1]]
            self._write(part, rows, slot, probs, slope)
            self._add_entries(part, means, slope)
        return torch.stack([value, entropy, rest_mass]), agreement

    def _student_probs(self, part: ChunkSlice, rows: torch.Tensor) -> torch.Tensor:
        """``q_i`` [T', Vps], mapped columns under ``CarriedRows``."""
        probs = self._probs(self.student, self.statistics.student, rows, self.student_excluded)
        if not part.is_scaled:
            return probs
        carried = self._probs(self.student, self.statistics.carried.lse, rows, ~self.mapped)
        return torch.where(self.mapped, carried, probs)

    def _probs(
        self, side: ChunkedLogits, lse: LogSumExp, rows: torch.Tensor, excluded: torch.Tensor | None
    ) -> torch.Tensor:
        # Rows selected by index are a copy already.
        scaled = side.logits[rows].to(lse.peak.dtype)
        if self.options.temperature != 1.0:
            scaled.div_(self.options.temperature)
        if excluded is not None:
            scaled.masked_fill_(excluded, -torch.inf)
        return scaled.sub_(lse.peak[rows, None]).sub_(lse.log_sum[rows, None]).exp_()

    def _teacher_chunks(self, part: ChunkSlice) -> torch.Tensor:
        """``P_c`` [C', Vpt] over the reachable columns."""
        rows = self.teacher.rows.order[part.teacher].long()
        slot = self.teacher.rows.slots[rows] - part.chunks.start
        probs = self._probs(self.teacher, self.statistics.teacher, rows, self.unreached)
        sizes = self.teacher.rows.sizes()[part.chunks].clamp(min=1)[:, None]
        return probs.new_zeros(len(sizes), probs.shape[1]).index_add_(0, slot, probs).div_(sizes)

    def _compare(
        self, p: torch.Tensor, q: torch.Tensor, mass: torch.Tensor
    ) -> tuple[ProjectedTerms, torch.Tensor, torch.Tensor]:
        """Terms of this rank's columns, terms [2, C'] of the pooled rest, and its mass [C']."""
        direction, mixture = self.options.direction, self.options.mixture
        vocab_topk = self.options.vocab_topk
        shard = self.teacher.shard
        if vocab_topk is None or vocab_topk >= shard.vocab_size:
            nothing = mass.new_zeros(2, len(mass))
            return projected_terms(p, q, mass, direction, mixture), nothing, nothing[0]
        rest = p < kept_threshold(p, vocab_topk, shard.group)[:, None]
        p, q, masses = pool_rest(p, q, rest, shard.group)
        at_rest = projected_terms(masses[0, :, None], masses[1, :, None], mass, direction, mixture)
        terms = projected_terms(p, q, mass, direction, mixture)
        unpooled = (part.masked_fill(rest, 0.0) for part in (terms.value, terms.centre))
        pooled = torch.stack([at_rest.value[:, 0], at_rest.centre[:, 0]])
        return ProjectedTerms(terms.slope, *unpooled), pooled, masses[0]

    def _write(
        self,
        part: ChunkSlice,
        rows: torch.Tensor,
        slot: torch.Tensor,
        probs: torch.Tensor,
        slope: torch.Tensor,
    ) -> None:
        """Equation 10 of the slice's rows, for ``slope`` [C', Vt]; ``probs`` is overwritten."""
        if self.requested.gradient is None:
            return
        carried = (slope @ self.onto_student)[slot]
        dots = (probs * carried).sum(dim=-1, keepdim=True)
        dots = all_reduce_sum(dots, self.student.shard.group)
        if part.is_scaled:
            # For scaled-up mapped columns this is less than rounding.
            is_scaled = self.statistics.carried.is_scaled[part.chunks][slot, None]
            dots = torch.where(is_scaled & self.mapped, 0.0, dots)
        carried.sub_(dots)
        grad_scale = self.requested.grad_scale[part.chunks]
        scale = (self.options.temperature * grad_scale / self.sizes[part.chunks])[slot, None]
        out = probs.mul_(carried).mul_(scale)
        self._store(rows, out.masked_fill_(scale == 0, 0.0))

    def _write_outside_chunks(self, start: int) -> None:
        """Cross-entropy, or 0, of the rows from place ``start`` of ``ChunkRows.order`` on."""
        if self.requested.gradient is None:
            return
        logits = self.student.logits
        outside = self.student.rows.order[start:].long()
        for part in row_slices(len(outside), logits.shape[1], device=logits.device):
            rows = outside[part]
            self._store(rows, self.mass.new_zeros(len(rows), logits.shape[1]))

    def _store(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the cross-entropy's gradient to ``out`` [T', Vps], and round it once."""
        gradient, term = self.requested.gradient, self.requested.cross_entropy
        assert gradient is not None
        if term is not None:
            assert self.labels is not None
            assert self.statistics.untempered is not None
            add_label_gradient_(
                out,
                self.student.logits[rows],
                self.statistics.untempered,
                self.labels,
                term,
                rows,
                self.student_excluded,
            )
        gradient[rows] = out.to(gradient.dtype)

    def _add_entries(self, part: ChunkSlice, means: torch.Tensor, slope: torch.Tensor) -> None:
        learned, total = self.requested.learned, self.requested.entry_gradient
        if learned is None or total is None:
            return
        scale = self.options.temperature**2 * self.requested.grad_scale[part.chunks]
        total += entry_gradient(means, slope, scale, learned.row, learned.column)


def mean_mapped_mass(statistics: ChunkStatistics, rows: ChunkRows) -> torch.Tensor:
    """``M_c`` [C]: mean mapped mass of a chunk's rows, at least the floor."""
    mean = rows.means(statistics.mapped)
    return mean.clamp_(min=probability_floor(mean))

"""Numbers of rows and chunks that kernels of the projected KL read. T rows, C chunks."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows
from megatron_ext.ops.divergence import probability_floor
from megatron_ext.ops.launch import HALF_FULL, small_block
from megatron_ext.ops.projected_kl.column_plan import pair_block, pair_parts
from megatron_ext.ops.projected_kl.operands import (
    ProjectedKLOptions,
    RequestedOutputs,
    ShardedProjection,
)
from megatron_ext.ops.projected_kl.statistics import ChunkStatistics, label_columns

_SUMMED_CHUNKS: Final = 1024


class KernelNumbers(NamedTuple):
    """What kernels read of rows and chunks; a log-sum-exp is its peak and logarithm, [2, T]."""

    student_lse: torch.Tensor
    carried_lse: torch.Tensor
    teacher_lse: torch.Tensor

    plain_lse: torch.Tensor | None
    """Of the student at temperature 1; None unless labels are compared."""

    is_scaled: torch.Tensor
    """bool [C]"""

    mass: torch.Tensor
    """M_c, fp32 [C]"""

    grad_scale: torch.Tensor
    """fp32 [C], 0 of chunks that are not compared."""

    left_out: torch.Tensor
    """fp32 [C] teacher's mass on columns that are not reachable, summed over the chunk's rows."""

    columns: tuple[torch.Tensor, torch.Tensor]
    """int64 [Ts] and [Tt]: this rank's column of the largest logit."""

    label: torch.Tensor | None
    """int64 [Ts]: this rank's column of each label, -1 where it has none."""

    label_weight: torch.Tensor | None
    """fp32 [Ts]"""

    @classmethod
    def of(
        cls,
        statistics: ChunkStatistics,
        student: ChunkedLogits,
        teacher: ChunkedLogits,
        requested: RequestedOutputs,
    ) -> KernelNumbers:
        """Collect what was exchanged; ``requested`` has the scale of what is compared."""
        mass = mean_over_rows(statistics.mapped, student.rows)
        plain = statistics.untempered
        return cls(
            torch.stack(list(statistics.student)),
            torch.stack(list(statistics.carried.lse)),
            torch.stack(list(statistics.teacher)),
            None if plain is None else torch.stack(list(plain)),
            statistics.carried.is_scaled,
            mass.clamp_(min=probability_floor(mass)),
            requested.grad_scale.float().contiguous(),
            sum_over_rows(statistics.left_out, teacher.rows),
            statistics.local_columns,
            *_labels(student, requested),
        )


def launch_singles(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    projection: ShardedProjection,
    numbers: KernelNumbers,
    options: ProjectedKLOptions,
    gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct pairs of chunks of one student row, and their gradient but for residual columns.

    Returns:
        Terms of D and of the entropy and largest P and Q~, fp32 [4, C, parts], and the teacher's
        columns of the largest, int32 [2, C, parts]: 0 and -1 of other chunks.
    """
    from megatron_ext.ops.projected_kl.single_kernel import single_kernel

    plan, shard = projection.plan, student.shard
    assert plan is not None
    logits, others, chunks = student.logits, teacher.logits, student.rows.chunk_count
    block, parts = pair_block(shard.width), pair_parts(shard.width)
    partial = logits.new_empty(4, chunks, parts, dtype=torch.float32)
    best = logits.new_empty(2, chunks, parts, dtype=torch.int32)
    if not options.diagnostics:
        partial[1:].zero_()
    aligned = plan.aligned
    mapped = 0 if aligned is None else aligned + plan.residual_rows
    if chunks:
        single_kernel[(chunks * parts,)](
            logits,
            student.rows.order,
            student.rows.offsets,
            logits.stride(0),
            numbers.student_lse,
            len(logits),
            numbers.is_scaled,
            shard.valid_width,
            shard.width,
            others,
            teacher.rows.order,
            teacher.rows.offsets,
            others.stride(0),
            numbers.teacher_lse,
            len(others),
            options.temperature,
            chunks,
            plan.partner,
            0 if aligned is None else aligned // 16,
            mapped // 16,
            projection.row_mass,
            numbers.mass,
            partial,
            best,
            numbers.grad_scale,
            gradient,
            0 if gradient is None else gradient.stride(0),
            numbers.plain_lse,
            numbers.label,
            numbers.label_weight,
            *numbers.columns,
            IS_ALIGNED=aligned is not None,
            HAS_GRADIENT=gradient is not None,
            HAS_DIAGNOSTICS=options.diagnostics,
            HAS_LABELS=numbers.label is not None,
            HAS_TEMPERATURE=options.temperature != 1.0,
            PARTS=parts,
            BLOCK=block,
            num_warps=max(1, block // 256),
            **({} if aligned is None else HALF_FULL),
        )
    return partial, best


def mean_over_rows(values: torch.Tensor, rows: ChunkRows) -> torch.Tensor:
    """Means [C] of ``values`` fp32 [T] over the rows of each chunk, in a fixed order."""
    return sum_over_rows(values, rows).div_(rows.sizes().clamp(min=1))


def sum_over_rows(values: torch.Tensor, rows: ChunkRows) -> torch.Tensor:
    """Sums [C] of ``values`` fp32 [T] over the rows of each chunk, in a fixed order."""
    from megatron_ext.ops.projected_kl.triton_kernels import chunk_sums_kernel

    out = torch.empty(rows.chunk_count, dtype=torch.float32, device=values.device)
    if len(out):
        block = small_block(len(out), _SUMMED_CHUNKS)
        chunk_sums_kernel[(-(-len(out) // block),)](
            values, rows.order, rows.offsets, len(out), out, BLOCK=block
        )
    return out


def _labels(
    student: ChunkedLogits, requested: RequestedOutputs
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if requested.cross_entropy is None:
        return None, None
    label, weight = requested.cross_entropy
    column = label_columns(label, student.shard)
    return column, weight.float().masked_fill(label < 0, 0.0)

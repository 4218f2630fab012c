"""Numbers of rows and chunks that kernels of the projected KL read. T rows, C chunks."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, merge_argmax
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows
from megatron_ext.ops.divergence import probability_floor
from megatron_ext.ops.launch import HALF_FULL, small_block
from megatron_ext.ops.projected_kl.column_plan import pair_block, pair_parts
from megatron_ext.ops.projected_kl.operands import (
    ProjectedKLOptions,
    ProjectedValues,
    ShardedProjection,
    WeightedLabels,
)
from megatron_ext.ops.projected_kl.statistics import MergedSums, mapped_mass

_CHUNKS: Final = 128
_LABELS: Final = 1024
"""Chunks, and labels, of a program."""

_BLOCKS: Final = 128
"""Blocks of columns whose terms a program adds at once."""


class KernelNumbers(NamedTuple):
    """What kernels read of rows and chunks; a log-sum-exp is its peak and logarithm, [2, T]."""

    student_lse: torch.Tensor
    """Of rows of chunks alone, as are the next two."""

    carried_lse: torch.Tensor
    teacher_lse: torch.Tensor

    is_scaled: torch.Tensor
    """bool [C]"""

    mass: torch.Tensor
    """M_c, fp32 [C]"""

    compared: torch.Tensor
    """bool [C]: chunks in which both models have a distribution."""

    grad_scale: torch.Tensor
    """fp32 [C], 0 of chunks that are not compared."""

    left_out: torch.Tensor
    """fp32 [C] teacher's mass on columns that are not reachable, summed over the chunk's rows."""

    columns: tuple[torch.Tensor, torch.Tensor]
    """int64 [Ts] and [Tt]: this rank's column of the largest logit."""

    plain_lse: torch.Tensor | None
    """Of the student at temperature 1; None unless labels are compared."""

    label: torch.Tensor | None
    """int64 [Ts]: this rank's column of each label, -1 where it has none."""

    label_weight: torch.Tensor | None
    """fp32 [Ts]"""

    token_loss: torch.Tensor | None
    """fp32 [Ts] as ``token_losses`` gives it."""

    @classmethod
    def of(
        cls,
        sums: MergedSums,
        student: ChunkedLogits,
        teacher: ChunkedLogits,
        projection: ShardedProjection,
        cross_entropy: WeightedLabels | None,
        grad_scale: torch.Tensor | float,
        temperature: float,
    ) -> KernelNumbers:
        """Compute them from the rows' sums; ``grad_scale`` is [C], or that of every chunk.

        One all-reduce of [Ts] and another read of the student unless ``projection.has_unit_rows``,
        and one of [Ts] for labels.
        """
        from megatron_ext.ops.projected_kl.number_kernels import chunk_numbers_kernel

        new, rows, count = sums.peak.new_empty, student.rows, student.rows.chunk_count
        # Each by itself: a kernel is compiled anew for a pointer that is no multiple of 16 bytes.
        whole, carried = new(2, len(rows.order)), new(2, len(rows.order))
        reached = new(2, len(teacher.rows.order))
        mass, left_out, scales = new(count), new(count), new(count)
        is_scaled, compared = new(count, dtype=torch.bool), new(count, dtype=torch.bool)
        if count:
            block = small_block(count, _CHUNKS)
            chunk_numbers_kernel[(-(-count // block),)](
                sums.peak,
                sums.log_sum,
                rows.order,
                rows.offsets,
                len(rows.order),
                teacher.rows.order,
                teacher.rows.offsets,
                len(teacher.rows.order),
                *_own_or_common(grad_scale),
                count,
                whole,
                carried,
                reached,
                is_scaled,
                mass,
                left_out,
                compared,
                scales,
                BLOCK=block,
            )
        if not projection.has_unit_rows:
            mapped = mapped_mass(student, LogSumExp(*carried), projection, temperature)
            mass = rows.means(mapped)
            mass.clamp_(min=probability_floor(mass))
        return cls(
            whole,
            carried,
            reached,
            is_scaled,
            mass,
            compared,
            scales,
            left_out,
            sums.local_columns,
            *_labels(sums, student, teacher, cross_entropy),
        )


def _own_or_common(weight: torch.Tensor | float) -> tuple[torch.Tensor | None, float]:
    """Weights that a kernel reads, or the one of all."""
    if isinstance(weight, torch.Tensor):
        return weight.float().contiguous(), 0.0
    return None, float(weight)


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


def chunk_values(
    terms: tuple[torch.Tensor, torch.Tensor],
    slot_blocks: int,
    singles: tuple[torch.Tensor, torch.Tensor] | None,
    rows: ChunkRows,
    numbers: KernelNumbers,
    shard: VocabShard,
    options: ProjectedKLOptions,
) -> ProjectedValues:
    """``tau^2 D_c`` and the other values of all chunks, 0 of those that are not compared.

    One all-reduce of [3, C], and for diagnostics two.

    Args:
        terms: By blocks of columns, fp32 [4, C, blocks] and int32 [2, C, blocks].
        slot_blocks: Blocks of summed columns; of chunks in ``singles`` there are no others.
        singles: Those of ``launch_singles``; None: it compares no chunk.
        rows: The student's.
        shard: The teacher's.
    """
    from megatron_ext.ops.projected_kl.number_kernels import chunk_values_kernel

    (partial, best), count = terms, rows.chunk_count
    more, more_best = singles or (None, None)
    sums, largest = partial.new_empty(3, count), partial.new_empty(2, count)
    column = best.new_empty(2, count, dtype=torch.int64)
    blocks = partial.shape[-1]
    if count:
        chunk_values_kernel[(count,)](
            partial,
            best,
            slot_blocks,
            blocks,
            more,
            more_best,
            rows.offsets,
            numbers.is_scaled,
            numbers.grad_scale,
            numbers.compared,
            options.temperature**2,
            shard.start,
            count,
            sums,
            largest,
            column,
            HAS_SINGLES=more is not None,
            HAS_DIAGNOSTICS=options.diagnostics,
            PARTS=1 if more is None else more.shape[-1],
            BLOCK=small_block(blocks, _BLOCKS),
            num_warps=1,
        )
    value, entropy, rest = all_reduce_sum(sums, shard.group)
    if options.diagnostics:
        # Columns that differ where nothing is compared.
        p_top, q_top = merge_argmax(largest, column, shard.group)
        agreement = p_top == q_top
    else:
        agreement = torch.zeros_like(numbers.compared)
    return ProjectedValues(value, entropy, agreement, rest)


def _labels(
    sums: MergedSums,
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    cross_entropy: WeightedLabels | None,
) -> tuple[torch.Tensor | None, ...]:
    """``plain_lse``, and column, weight and loss of each label; None where there are none."""
    if cross_entropy is None:
        return None, None, None, None
    from megatron_ext.ops.projected_kl.number_kernels import label_numbers_kernel

    logits, shard = student.logits, student.shard
    rows, tempered = len(logits), 2 * (len(logits) + len(teacher.logits))
    label, new = cross_entropy.label.contiguous(), sums.peak.new_empty
    plain, column, weight, loss = new(2, rows), torch.empty_like(label), new(rows), new(rows)
    if rows:
        block = small_block(rows, _LABELS)
        label_numbers_kernel[(-(-rows // block),)](
            logits,
            logits.stride(0),
            sums.peak,
            sums.log_sum,
            tempered if len(sums.peak) > tempered else 0,
            label,
            *_own_or_common(cross_entropy.weight),
            shard.start,
            shard.valid_width,
            shard.vocab_size,
            rows,
            plain,
            column,
            weight,
            loss,
            BLOCK=block,
        )
    # A label has its loss from the rank that holds its column.
    return plain, column, weight, all_reduce_sum(loss, shard.group)

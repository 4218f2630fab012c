"""Numbers of rows and chunks that kernels of the projected KL read. T rows, C chunks."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, merge_argmax
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.divergence import probability_floor
from megatron_ext.ops.launch import HALF_FULL, small_block
from megatron_ext.ops.projected_kl.column_plan import pair_block, pair_parts
from megatron_ext.ops.projected_kl.operands import (
    ProjectedKLOptions,
    ProjectedValues,
    RequestedOutputs,
    ShardedProjection,
)
from megatron_ext.ops.projected_kl.statistics import MergedSums, mapped_mass, token_losses

_CHUNKS: Final = 128
_LABELS: Final = 1024
"""Chunks, and labels, of a program."""

_BLOCKS: Final = 128
"""Blocks of columns whose terms a program adds at once."""


class KernelNumbers(NamedTuple):
    """What kernels read of rows and chunks; a log-sum-exp is its peak and logarithm, [2, T]."""

    student_lse: torch.Tensor

    carried_lse: torch.Tensor
    """Of rows of chunks alone."""

    teacher_lse: torch.Tensor

    plain_lse: torch.Tensor | None
    """Of the student at temperature 1; None unless labels are compared."""

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
        requested: RequestedOutputs,
        temperature: float,
    ) -> KernelNumbers:
        """Compute them from the rows' sums; ``requested`` has the scale of every chunk.

        One all-reduce of [Ts] and another read of the student unless ``projection.has_unit_rows``,
        and one of [Ts] for labels.
        """
        from megatron_ext.ops.projected_kl.number_kernels import chunk_numbers_kernel

        parts = sums.parts
        whole, rows = torch.stack(list(parts[0])), student.rows
        plain = None
        if requested.cross_entropy is not None:
            plain = whole if len(parts) == 4 else torch.stack(list(parts[4]))
        new, count = sums.peak.new_empty, rows.chunk_count
        # Each by itself: a kernel is compiled anew for a pointer that is no multiple of 16 bytes.
        carried, mass, left_out, grad_scale = (
            torch.empty_like(whole),
            new(count),
            new(count),
            new(count),
        )
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
                requested.grad_scale.float().contiguous(),
                count,
                carried,
                is_scaled,
                mass,
                left_out,
                compared,
                grad_scale,
                BLOCK=block,
            )
        if not projection.has_unit_rows:
            mapped = mapped_mass(student, LogSumExp(*carried), projection, temperature)
            mass = rows.means(mapped)
            mass.clamp_(min=probability_floor(mass))
        return cls(
            whole,
            carried,
            torch.stack(list(parts[3])),
            plain,
            is_scaled,
            mass,
            compared,
            grad_scale,
            left_out,
            sums.local_columns,
            *_labels(student, requested, plain),
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


def chunk_values(
    terms: tuple[torch.Tensor, torch.Tensor],
    singles: tuple[torch.Tensor, torch.Tensor] | None,
    compared: torch.Tensor,
    shard: VocabShard,
    options: ProjectedKLOptions,
) -> ProjectedValues:
    """``tau^2 D_c`` and the other values of all chunks, 0 of those that are not compared.

    One all-reduce of [2, C], and for diagnostics two.

    Args:
        terms: By blocks of columns, fp32 [4, C, blocks] and int32 [2, C, blocks].
        singles: Those of ``launch_singles``.
        compared: bool [C]
        shard: The teacher's.
    """
    from megatron_ext.ops.projected_kl.number_kernels import chunk_values_kernel

    (partial, best), count = terms, len(compared)
    more, more_best = singles or (None, None)
    sums, largest = partial.new_empty(2, count), partial.new_empty(2, count)
    column = best.new_empty(2, count, dtype=torch.int64)
    blocks = partial.shape[-1]
    if count:
        chunk_values_kernel[(count,)](
            partial,
            best,
            blocks,
            more,
            more_best,
            compared,
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
    value, entropy = all_reduce_sum(sums, shard.group)
    agreement = torch.zeros_like(compared)
    if options.diagnostics:
        p_top, q_top = merge_argmax(largest, column, shard.group)
        agreement = (p_top == q_top) & compared
    return ProjectedValues(value, entropy, agreement, torch.zeros_like(value))


def _labels(
    student: ChunkedLogits, requested: RequestedOutputs, plain: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Column, weight and loss of each label; None where there are none."""
    if requested.cross_entropy is None:
        return None, None, None
    from megatron_ext.ops.projected_kl.number_kernels import label_numbers_kernel

    assert plain is not None
    (label, weight), logits, shard = requested.cross_entropy, student.logits, student.shard
    label, rows = label.contiguous(), len(logits)
    column, label_weight, picked = (
        torch.empty_like(label),
        plain.new_empty(rows),
        plain.new_empty(rows),
    )
    if rows:
        block = small_block(rows, _LABELS)
        label_numbers_kernel[(-(-rows // block),)](
            logits,
            logits.stride(0),
            label,
            weight.float().contiguous(),
            shard.start,
            shard.valid_width,
            rows,
            column,
            label_weight,
            picked,
            BLOCK=block,
        )
    picked = all_reduce_sum(picked, shard.group)
    return column, label_weight, token_losses(picked, label, LogSumExp(*plain), shard)

"""Numbers of rows and of chunks of one token a side that kernels make. T rows, C chunks."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp
from megatron_ext.ops.launch import small_block
from megatron_ext.ops.partition_kl.operands import PartitionPlan

_BLOCK: Final = 256


class SideSums(NamedTuple):
    """Merged sums of one model's rows, and this rank's column of each row's largest member."""

    members: LogSumExp
    """[T] at the temperature."""

    others: LogSumExp
    """[T] at temperature 1."""

    column: torch.Tensor
    """int64 [T]"""


class SingleNorms(NamedTuple):
    """Numbers of chunks of one token a side."""

    numbers: torch.Tensor
    """fp32 [14, C]: the student's peak and log-sum-exp over its events, the teacher's; peak and sum
    of the student's rest, its probability and its logarithm, and the logarithm of the most probable
    shared token; then these five of the teacher."""

    columns: torch.Tensor
    """int64 [2, C]: this rank's largest shared column of both rows."""

    def cut(self, part: slice) -> torch.Tensor:
        """The numbers of some chunks, contiguous."""
        return self.numbers[:, part].contiguous()


def single_norms(student: SideSums, teacher: SideSums, plan: PartitionPlan) -> SingleNorms:
    """Normalisers of the chunks' rows; one launch."""
    from megatron_ext.ops.partition_kl.number_kernels import single_norms_kernel

    count = len(plan.singles.student)
    numbers = student.members.peak.new_empty(14, count)
    columns = student.column.new_empty(2, count)
    if count:
        block = small_block(count, _BLOCK)
        single_norms_kernel[(-(-count // block),)](
            *student.members,
            *student.others,
            *teacher.members,
            *teacher.others,
            *plan.singles,
            student.column,
            teacher.column,
            count,
            plan.options.temperature,
            numbers,
            columns,
            BLOCK=block,
        )
    return SingleNorms(numbers, columns)


def single_agreement(
    norms: SingleNorms, student: torch.Tensor, teacher: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """bool [C]: chunks with the same most probable event in both models; one launch.

    Args:
        student: int64 [C]: global column of the largest shared token.
        teacher: int64 [C]: likewise.
        tokens: int64 [Vt]: the student's token of each of the teacher's, negative for none.
    """
    from megatron_ext.ops.partition_kl.number_kernels import single_agreement_kernel

    count = len(student)
    agreement = torch.empty_like(student, dtype=torch.bool)
    if count:
        block = small_block(count, _BLOCK)
        single_agreement_kernel[(-(-count // block),)](
            norms.numbers, student, teacher, tokens, len(tokens), count, agreement, BLOCK=block
        )
    return agreement


def rest_terms_by_kernel(
    norms: torch.Tensor,
    summed: torch.Tensor,
    grad_scale: torch.Tensor | None,
    plan: PartitionPlan,
    *,
    is_lost: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rest_terms`` of some chunks from their ``SingleNorms.cut``; one launch.

    Args:
        summed: [C'] sum of the slopes of the shared tokens, or the teacher's mass on those that the
            student masks, if it ``is_lost``.
    """
    from megatron_ext.ops.partition_kl.number_kernels import rest_terms_kernel

    count = norms.shape[1]
    value, factors = norms.new_empty(count), norms.new_empty(3, count)
    if count:
        block = small_block(count, _BLOCK)
        rest_terms_kernel[(-(-count // block),)](
            norms,
            summed.contiguous(),
            None if grad_scale is None else grad_scale.float().contiguous(),
            count,
            plan.options.temperature,
            plan.options.mixture,
            value,
            factors,
            DIRECTION=plan.options.direction,
            IS_LOST=is_lost,
            BLOCK=block,
        )
    return value, factors


def whole_rows(members: LogSumExp, others: LogSumExp, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [3, T]: log-sum-exp of rows over members and others, both at temperature 1, and the
    weights of their labels; one launch."""
    from megatron_ext.ops.partition_kl.number_kernels import whole_rows_kernel

    rows = len(weight)
    numbers = members.peak.new_empty(3, rows)
    if rows:
        block = small_block(rows, _BLOCK)
        whole_rows_kernel[(-(-rows // block),)](
            *members, *others, weight, rows, numbers, BLOCK=block
        )
    return numbers

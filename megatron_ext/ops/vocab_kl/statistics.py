"""What both models' rows are normalised by, from one read. T rows, V real columns of this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import accumulation_dtype, row_slices, scaled_logits
from megatron_ext.ops.launch import ROW_CONFIGS, LaunchConfig, chosen_config, small_block
from megatron_ext.ops.row_sums import ExpSums


class PairStatistics(NamedTuple):
    """Of this rank's real columns, not merged over shards."""

    student: ExpSums
    """At the temperature, as are the next two."""

    teacher: ExpSums

    shared: ExpSums
    """The teacher's columns in which the student has mass."""

    plain: ExpSums | None
    """The student at temperature 1, where that is another."""

    columns: tuple[torch.Tensor, torch.Tensor]
    """int64 [T] of student and teacher: their largest logit's, the first of equals."""


def pair_statistics(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    temperature: float,
    with_plain: bool,
    read: torch.Tensor | None,
    held_width: int,
    by_kernel: bool,
) -> PairStatistics:
    """Statistics of each row in fp32 (fp64 where the student's logits are). No graph.

    Args:
        student: [T, V], without padding.
        teacher: [T, V].
        with_plain: Whether to sum the student at temperature 1 as well.
        read: bool [T]; the others have nothing, whatever they hold. None: all.
        held_width: Columns that rows of both have in memory, padding included.
    """
    if by_kernel and student.numel():
        found = _by_kernel(student, teacher, temperature, with_plain, read, held_width)
    else:
        found = _by_torch(student, teacher, temperature, with_plain, read)
    peak, total, column = found
    sums = [ExpSums(*part) for part in zip(peak, total, strict=True)]
    return PairStatistics(
        sums[0], sums[1], sums[2], sums[3] if with_plain else None, (column[0], column[1])
    )


def _by_torch(
    student: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    with_plain: bool,
    read: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = student.shape
    dtype = accumulation_dtype(student.dtype)
    peak, total = torch.zeros(2, 4 if with_plain else 3, rows, dtype=dtype, device=student.device)
    column = torch.zeros(2, rows, dtype=torch.int64, device=student.device)
    if not width:
        return peak, total, column
    for part in row_slices(rows, width, device=student.device):
        own = scaled_logits(student[part], temperature, None)
        other = scaled_logits(teacher[part], temperature, None).to(dtype)
        column[0, part], column[1, part] = own.argmax(dim=-1), other.argmax(dim=-1)
        masked = own == -torch.inf
        peak[0, part], total[0, part] = _sum_exponentials(own)
        peak[1, part], total[1, part] = _sum_exponentials(other)
        # ``other`` holds the teacher's exponentials now.
        peak[2, part] = peak[1, part]
        total[2, part] = other.masked_fill_(masked, 0.0).sum(dim=-1)
        if with_plain:
            plain = scaled_logits(student[part], 1.0, None)
            peak[3, part], total[3, part] = _sum_exponentials(plain)
    if read is not None:
        peak, total, column = (
            torch.where(read, found, torch.zeros_like(found)) for found in (peak, total, column)
        )
    return peak, total, column


def _sum_exponentials(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Peak and sum [T']; ``values`` [T', V] become the exponentials over the peak."""
    peak = values.amax(dim=-1)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    return peak, values.sub_(peak[:, None]).exp_().sum(dim=-1)


def _by_kernel(
    student: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    with_plain: bool,
    read: torch.Tensor | None,
    held_width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from megatron_ext.ops.vocab_kl.triton_kernels import pair_statistics_kernel

    rows, width = student.shape
    sums = 4 if with_plain else 3
    peak, total = torch.empty(2, sums, rows, dtype=torch.float32, device=student.device)
    column = torch.empty(2, rows, dtype=torch.int64, device=student.device)

    def launch(config: LaunchConfig) -> None:
        pair_statistics_kernel[(rows,)](
            student,
            teacher,
            read,
            peak,
            total,
            column,
            student.stride(0),
            teacher.stride(0),
            width,
            held_width,
            rows,
            temperature,
            HAS_READ=read is not None,
            HAS_PLAIN=with_plain,
            HAS_TEMPERATURE=temperature != 1.0,
            BLOCK=small_block(width, config.block),
            num_warps=config.num_warps,
        )

    flags = (with_plain, read is not None, temperature != 1.0)
    key = ("vocab_kl_statistics", student.dtype, teacher.dtype, width, held_width, *flags)
    launch(chosen_config(key, ROW_CONFIGS, launch))
    return peak, total, column

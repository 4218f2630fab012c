"""Statistics of two models' rows, and value and gradient of their divergence.

T rows, Vp columns, V real ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    accumulation_dtype,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ExpSums
from megatron_ext.ops.divergence import DivergenceOptions, divergence_terms
from megatron_ext.ops.labels import LabelTerm
from megatron_ext.ops.launch import (
    LANE_CONFIGS,
    Implementation,
    LaunchConfig,
    chosen_config,
    launch_rows,
    small_block,
)


class PairStatistics(NamedTuple):
    """Statistics of this rank's real columns, not merged over shards."""

    student: ExpSums
    """The student at the temperature."""

    teacher: ExpSums

    shared: ExpSums
    """The teacher's columns in which the student has mass, at the temperature."""

    plain: ExpSums | None
    """The student at temperature 1, if the temperature is another."""

    columns: tuple[torch.Tensor, torch.Tensor]
    """int64 [T] of student and teacher: column of the largest logit, the first of equals."""


def pair_statistics(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    temperature: float,
    with_plain: bool,
    read: torch.Tensor | None,
    held_width: int,
    by: Implementation,
) -> PairStatistics:
    """Statistics of each row in fp32 (fp64 where the student's logits are). No graph.

    Args:
        student: [T, V], without padding.
        teacher: [T, V].
        with_plain: Whether to sum the student at temperature 1 as well.
        read: bool [T]; other rows have sums of 0, whatever they hold. None: all.
        held_width: Columns of both models' rows in memory, padding included.
        by: What computes them, not ``auto``.
    """
    if by == "triton" and student.numel():
        statistics = _by_kernel(student, teacher, temperature, with_plain, read, held_width)
    elif by == "cpu":
        statistics = _by_loops(student, teacher, temperature, with_plain, read)
    else:
        statistics = _by_torch(student, teacher, temperature, with_plain, read)
    peak, total, column = statistics
    sums = [ExpSums(*part) for part in zip(peak, total, strict=True)]
    return PairStatistics(
        sums[0], sums[1], sums[2], sums[3] if with_plain else None, (column[0], column[1])
    )


def _by_loops(
    student: torch.Tensor,
    teacher: torch.Tensor,
    temperature: float,
    with_plain: bool,
    read: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from megatron_ext.ops import divergence_loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    rows, width = student.shape
    peak, total = np.empty((2, 4 if with_plain else 3, rows), dtype=np.float32)
    column = np.empty((2, rows), dtype=np.int64)
    arguments = (
        flat_rows(student, width, temperature),
        flat_rows(teacher, width, temperature),
        flat_rows(student, width if with_plain else 0),
        np.zeros(0, dtype=np.bool_) if read is None else read.numpy(),
        (peak, total, column),
    )
    in_threads(lambda a, b: divergence_loops.pair_statistics(a, b, *arguments), rows)
    return torch.from_numpy(peak), torch.from_numpy(total), torch.from_numpy(column)


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
            torch.where(read, each, torch.zeros_like(each)) for each in (peak, total, column)
        )
    return peak, total, column


def _sum_exponentials(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Peak and sum [T'] of ``values`` [T', V], which become their exponentials over the peak."""
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
    launch(chosen_config(key, LANE_CONFIGS, launch))
    return peak, total, column


class PairEvaluation(NamedTuple):
    """Two models' rows and their statistics over all shards, ready to be compared."""

    student: torch.Tensor
    """[T, V], without padding."""

    teacher: torch.Tensor
    """[T, V]"""

    own: LogSumExp
    """The student's log-sum-exp at the temperature."""

    other: LogSumExp
    """The teacher's log-sum-exp at the temperature."""

    weight: torch.Tensor
    """[T]: gradient of the row's D."""

    label: LabelTerm | None
    options: DivergenceOptions

    held_width: int
    """Columns of both models' rows in memory, padding included; at least V."""

    def run(
        self,
        *,
        centre: torch.Tensor | None = None,
        gradient: torch.Tensor | None = None,
        with_sums: bool = True,
        by: Implementation,
    ) -> torch.Tensor:
        """Sums of D, of its slope and of the teacher's entropy [3, T], of this rank's columns.

        Args:
            centre: [T], the sum of slopes over all shards; with a gradient.
            gradient: [T, Vp], receives equation (3) and the cross-entropy's gradient, 0 in padding
                and in rows without a weight. May overlap ``student``.
            with_sums: Whether to compute the sums; otherwise they are arbitrary.
        """
        assert gradient is None or centre is not None
        dtype = accumulation_dtype(self.student.dtype)
        sums = torch.zeros(3, len(self.weight), dtype=dtype, device=self.student.device)
        if not self.student.shape[1]:
            if gradient is not None:
                gradient.zero_()
        elif by == "triton":
            self._by_kernel(sums, centre, gradient, with_sums)
        elif by == "cpu":
            self._by_loops(sums, centre, gradient)
        else:
            self._by_torch(sums, centre, gradient)
        return sums

    def _by_loops(
        self, sums: torch.Tensor, centre: torch.Tensor | None, gradient: torch.Tensor | None
    ) -> None:
        from megatron_ext.ops import divergence_loops as loops
        from megatron_ext.ops.row_loops import flat_rows, in_threads, normaliser

        width, options = self.student.shape[1], self.options
        label = self.label if gradient is not None else None
        nothing = self.weight[:0].float()
        work = loops.PairWork(
            student=flat_rows(self.student, width, options.temperature),
            teacher=flat_rows(self.teacher, width, options.temperature),
            own=normaliser(self.own),
            other=normaliser(self.other),
            centre=(self.weight if centre is None else centre).float().numpy(),
            weight=(self.weight * options.temperature).float().numpy(),
            direction=loops.DIRECTIONS[options.direction],
            mixture=np.float32(options.mixture),
            plain=flat_rows(self.student, width),
            plain_lse=normaliser(self.own if label is None else label.whole),
            label=(nothing.long() if label is None else label.column).numpy(),
            label_weight=(nothing if label is None else label.weight.float()).numpy(),
            gradient=flat_rows(self.student[:0] if gradient is None else gradient),
        )
        found = sums.numpy()
        in_threads(lambda a, b: loops.divergence_rows(a, b, work, found), len(self.weight))

    def _by_torch(
        self, sums: torch.Tensor, centre: torch.Tensor | None, gradient: torch.Tensor | None
    ) -> None:
        width = self.student.shape[1]
        for rows in row_slices(*self.student.shape, device=self.student.device):
            log_q = self.own.normalise_(self._scaled(self.student, rows), rows)
            log_p = self.other.normalise_(self._scaled(self.teacher, rows), rows)
            value, slope = _terms(log_p, log_q, self.options)
            sums[0, rows], sums[1, rows] = value.sum(dim=-1), slope.sum(dim=-1)
            p = log_p.exp()
            sums[2, rows] = -(p * log_p.masked_fill_(p == 0, 0.0)).sum(dim=-1)
            if gradient is None or centre is None:
                continue
            # tau^2 of the loss, divided by the tau of the logits.
            scale = self.weight[rows, None] * self.options.temperature
            part = slope.sub_(log_q.exp_().mul_(centre[rows, None])).mul_(scale)
            part.masked_fill_(scale == 0, 0.0)
            if self.label is not None:
                plain = scaled_logits(self.student[rows], 1.0, None)
                part.add_(self.label.gradient(plain, rows))
            gradient[rows, :width] = part
            gradient[rows, width:] = 0.0

    def _scaled(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        scaled = scaled_logits(logits[rows], self.options.temperature, None)
        return scaled.to(self.own.peak.dtype)

    def _by_kernel(
        self,
        sums: torch.Tensor,
        centre: torch.Tensor | None,
        gradient: torch.Tensor | None,
        with_sums: bool,
    ) -> None:
        from megatron_ext.ops.vocab_kl.triton_kernels import vocab_kl_kernel

        rows, width = self.student.shape
        temperature, direction = self.options.temperature, self.options.direction
        label = self.label if gradient is not None else None
        vectors = [*self.own, *self.other, self.weight if centre is None else centre]
        vectors.append(self.weight * temperature)
        if label is not None:
            vectors += [*label.whole, label.weight]
        packed = torch.stack([vector.float() for vector in vectors])

        def launch(config: LaunchConfig, out: torch.Tensor) -> None:
            vocab_kl_kernel[(len(out),)](
                self.student,
                self.teacher,
                out,
                packed,
                None if label is None else label.column,
                sums,
                self.student.stride(0),
                self.teacher.stride(0),
                out.stride(0),
                width,
                self.held_width,
                out.shape[1],
                rows,
                temperature,
                self.options.mixture,
                DIRECTION=direction,
                HAS_SUMS=with_sums,
                HAS_GRADIENT=gradient is not None,
                HAS_LABELS=label is not None,
                HAS_TEMPERATURE=temperature != 1.0,
                BLOCK=config.block,
                num_warps=config.num_warps,
            )

        flags = (direction, with_sums, gradient is not None, label is not None, temperature != 1.0)
        key = ("vocab_kl", self.student.dtype, self.teacher.dtype, width, self.held_width, *flags)
        output = self.student if gradient is None else gradient
        launch_rows(key, launch, output, LANE_CONFIGS)


def _terms(
    log_p: torch.Tensor, log_q: torch.Tensor, options: DivergenceOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of the value and of the slope, up to a multiple of Q, which (3) takes out again."""
    value, slope = divergence_terms(log_p, log_q, options.direction, options.mixture)
    # The factor Q itself is left out: cancelling it would cost digits.
    return value, value.clone() if options.direction == "reverse" else slope

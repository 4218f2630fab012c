"""Signals of a policy gradient: what a teacher says of chunks that the student has sampled.

T rows, C chunks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.ops.chunk_rows import ChunkRows, chunk_slots, index_sum
from megatron_ext.ops.launch import Implementation, small_block, uses_triton
from megatron_ext.ops.unit_gradient import with_slope

_BLOCK: Final = 128
"""Chunks of a program."""

_MOST_IN_VALUE: Final = 5.0
_MOST_LOG_RATIO: Final = 20.0


class SignalLimits(NamedTuple):
    """Limits of what a chunk can weigh."""

    signal: float
    """Largest size of a signal, in nats."""

    ratio: float
    """Largest ratio of probabilities."""


class SampledSignals(NamedTuple):
    """[C] each; arbitrary where a chunk is not ``kept``."""

    loss: torch.Tensor
    """Estimate of the divergence. Its graph to the student's log-likelihoods is that of
    ``-weight signal log Q``, the weight being the ratio, cut."""

    student_nats: torch.Tensor
    """Negative log-likelihoods."""

    teacher_nats: torch.Tensor

    ratio: torch.Tensor
    """Probability of the chunk by the student over that by its engine, before it is cut; 1 where a
    row's is not known."""

    cut: torch.Tensor
    """1 where the ratio is cut, else 0."""

    kept: torch.Tensor
    """bool: usable, and no model gives the chunk the probability 0."""


def sampled_signals(
    student: torch.Tensor,
    teacher: torch.Tensor,
    usable: torch.Tensor,
    sampled: torch.Tensor | None,
    rows: ChunkRows,
    limits: SignalLimits,
    *,
    implementation: Implementation = "auto",
) -> SampledSignals:
    """Compare the log-likelihoods [C] of chunks' sampled tokens; by kernel one launch.

    No collectives.

    Args:
        student: fp32 or fp64, with a graph or without.
        teacher: The same dtype.
        usable: bool [C]; the numbers of other chunks are ignored, NaN included.
        sampled: [T] log-probabilities of the engine that has sampled, NaN where they are not known;
            None: all ratios are 1.
        rows: The student's rows of each chunk.
    """
    if student.dtype == torch.float32 and uses_triton(implementation, student):
        return _by_kernel(student, teacher, usable, sampled, rows, limits)
    kept = usable & (student != -torch.inf) & (teacher != -torch.inf)
    # Values left out become an ordinary number first, so that their gradient is 0, too.
    student, its = (torch.where(kept, x, -1.0) for x in (student, teacher))
    own = student.detach()
    signal = (its - own).clamp(-limits.signal, limits.signal)
    ratio = _ratio(own, sampled, rows)
    weight = ratio.clamp(max=limits.ratio)
    near = signal.clamp(max=_MOST_IN_VALUE)
    value = near.exp() - near - 1
    cut = (ratio > limits.ratio).to(ratio.dtype)
    loss = value - weight * signal * (student - own)
    return SampledSignals(loss, -own, -its, ratio, cut, kept)


def _ratio(own: torch.Tensor, sampled: torch.Tensor | None, rows: ChunkRows) -> torch.Tensor:
    if sampled is None:
        return torch.ones_like(own)
    slots, count = chunk_slots(rows.chunk_id, len(own)), len(own)
    values = torch.stack([sampled.masked_fill(sampled.isnan(), 0.0), sampled.isnan().float()])
    sums, unknown = (index_sum(row.to(own.dtype), slots, count + 1)[:-1] for row in values)
    return torch.where(unknown > 0, 1.0, (own - sums).clamp(max=_MOST_LOG_RATIO).exp())


def _by_kernel(
    student: torch.Tensor,
    teacher: torch.Tensor,
    usable: torch.Tensor,
    sampled: torch.Tensor | None,
    rows: ChunkRows,
    limits: SignalLimits,
) -> SampledSignals:
    from megatron_ext.ops.likelihood_kernels import sampled_signals_kernel

    count, block = len(student), small_block(len(student), _BLOCK)
    own = student.detach()
    numbers, kept = own.new_empty(6, count), torch.empty_like(usable)
    if count:
        sampled_signals_kernel[(-(-count // block),)](
            own,
            teacher.contiguous(),
            usable,
            None if sampled is None else sampled.float().contiguous(),
            rows.order,
            rows.offsets,
            count,
            *limits,
            _MOST_IN_VALUE,
            _MOST_LOG_RATIO,
            numbers,
            kept,
            BLOCK=block,
        )
    loss, student_nats, teacher_nats, ratio, cut, slope = numbers.unbind()
    loss = with_slope(student, loss, slope)
    return SampledSignals(loss, student_nats, teacher_nats, ratio, cut, kept)

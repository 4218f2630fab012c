"""Softmax statistics of this rank's columns, from one read. T rows, Vp local columns."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch

from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    finite_peak,
    local_log_sum_exp,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.launch import (
    ROW_CONFIGS,
    Implementation,
    LaunchConfig,
    chosen_config,
    small_block,
    uses_compiled,
    uses_triton,
)

_SAFE_DISTANCE: Final = 40.0
"""Nats from the peak at which fp32 exponentials have all their digits, those around them too."""


class RowStatistics(NamedTuple):
    """Statistics of this rank's real columns; ``merge_log_sum_exp`` merges them over shards."""

    peak: torch.Tensor
    """[2, T]: largest logit over tau, of all columns and of the members; 0 where there is none."""

    total: torch.Tensor
    """[2, T]: sum of ``exp(logit / tau - peak)``."""

    column: torch.Tensor
    """int64 [T]: this rank's column of the largest logit, the first of equals."""


def row_statistics(
    logits: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    members: torch.Tensor | None = None,
    read: torch.Tensor | None = None,
    with_column: bool = True,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    implementation: Implementation = "auto",
) -> RowStatistics:
    """Softmax statistics of each row, in fp32 (fp64 for fp64 logits). No graph, no collectives.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns. Padding is ignored.
        members: bool [Vp]; the second peak and sum are over its columns. None: over all.
        read: bool [T]; other rows are not read and have a sum of 0. None: all.
        with_column: Whether to compute ``column``; otherwise it may be arbitrary.
        into: Memory that takes the peaks and the sums, [2 T] each, or [T] without members.
    """
    logits, width = logits.detach(), shard.valid_width
    if width and uses_triton(implementation, logits):
        return _by_kernel(logits, width, temperature, members, read, into)
    if width and uses_compiled(implementation, logits):
        statistics = _by_compiled(logits, width, temperature, members, read, with_column)
    else:
        within = None if members is None else members[:width]
        statistics = _by_torch(logits[:, :width], temperature, within, with_column)
        if read is not None:
            read_ones = (part.where(read, torch.zeros_like(part)) for part in statistics)
            statistics = RowStatistics(*read_ones)
    for memory, part in zip(into or (), statistics, strict=False):
        memory.copy_(part.view(-1)[: len(memory)])
    return statistics


def row_log_sum_exp(
    logits: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    implementation: Implementation = "auto",
) -> LogSumExp:
    """Log-sum-exp [T] of ``logits / temperature`` over all shards. No graph; two all-reduces."""
    statistics = row_statistics(
        logits,
        shard,
        temperature=temperature,
        with_column=False,
        implementation=implementation,
    )
    return merge_log_sum_exp(statistics.peak[0], statistics.total[0], shard.group)


def _by_torch(
    logits: torch.Tensor, temperature: float, members: torch.Tensor | None, with_column: bool
) -> RowStatistics:
    rows, dtype = logits.shape[0], accumulation_dtype(logits.dtype)
    if not logits.shape[1]:
        empty = torch.zeros(2, rows, dtype=dtype, device=logits.device)
        return RowStatistics(empty, empty.clone(), empty[0].long())
    column = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    peak, total = torch.empty(2, 2, rows, dtype=dtype, device=logits.device)
    for part in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[part], temperature, None)
        if with_column:
            column[part] = scaled.argmax(dim=-1)
        best = scaled.amax(dim=-1)
        inside = best if members is None else scaled.masked_fill(~members, -torch.inf).amax(dim=-1)
        peak[0, part], peak[1, part] = finite_peak(best), finite_peak(inside)
        weights = scaled.sub_(peak[0, part, None]).exp_()
        total[0, part] = weights.sum(dim=-1)
        if members is None:
            total[1, part] = total[0, part]
            continue
        # Exponentials that are there, unless they are too small beside those of the other columns.
        far = ~(best - inside < _SAFE_DISTANCE)
        scale = torch.exp((peak[0, part] - peak[1, part]).masked_fill(far, 0.0))
        total[1, part] = weights.mul_(members).sum(dim=-1).mul_(scale)
        if logits.device.type != "cpu" or bool(far.any()):
            _, exact = local_log_sum_exp(logits[part], temperature, ~members)
            total[1, part] = torch.where(far, exact, total[1, part])
    return RowStatistics(peak, total, column)


def _by_compiled(
    logits: torch.Tensor,
    width: int,
    temperature: float,
    members: torch.Tensor | None,
    read: torch.Tensor | None,
    with_column: bool,
) -> RowStatistics:
    from megatron_ext.ops import row_loops as compiled
    from megatron_ext.ops.row_loops import in_threads

    peak, total = np.empty((2, 2, len(logits)), dtype=np.float32)
    column = np.empty(len(logits), dtype=np.int64)
    all_of_them = np.zeros(0, dtype=np.bool_)
    arguments = (
        compiled.flat_rows(logits, width, temperature),
        all_of_them if members is None else members[:width].numpy(),
        all_of_them if read is None else read.numpy(),
        with_column,
        peak,
        total,
        column,
    )
    in_threads(lambda a, b: compiled.row_statistics(a, b, *arguments), len(logits))
    return RowStatistics(*map(torch.from_numpy, (peak, total, column)))


def _by_kernel(
    logits: torch.Tensor,
    width: int,
    temperature: float,
    members: torch.Tensor | None,
    read: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> RowStatistics:
    from megatron_ext.ops.softmax_kernels import row_statistics_kernel

    rows, held_width = logits.shape
    sums = 1 if members is None else 2
    if into is None:
        peak, total = torch.empty(2, sums * rows, dtype=torch.float32, device=logits.device)
    else:
        peak, total = into
    column = torch.empty(rows, dtype=torch.int64, device=logits.device)

    def launch(config: LaunchConfig) -> None:
        row_statistics_kernel[(rows,)](
            logits,
            members,
            read,
            peak,
            total,
            column,
            logits.stride(0),
            width,
            held_width,
            rows,
            temperature,
            HAS_MEMBERS=members is not None,
            HAS_READ=read is not None,
            HAS_TEMPERATURE=temperature != 1.0,
            BLOCK=small_block(width, config.block),
            num_warps=config.num_warps,
        )

    if rows:
        flags = (members is not None, read is not None, temperature != 1.0)
        key = ("row_statistics", logits.dtype, width, held_width, *flags)
        launch(chosen_config(key, ROW_CONFIGS, launch))
    # Without members both are over all columns.
    peak, total = (part.view(sums, rows).expand(2, rows) for part in (peak, total))
    return RowStatistics(peak, total, column)


def row_statistics_reference(
    logits: torch.Tensor, *, temperature: float = 1.0, members: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exps [T] over all columns and over ``members`` bool [V], and the argmax [T]."""
    scaled = logits / temperature
    inside = scaled if members is None else scaled.masked_fill(~members, -torch.inf)
    return scaled.logsumexp(dim=-1), inside.logsumexp(dim=-1), scaled.argmax(dim=-1)

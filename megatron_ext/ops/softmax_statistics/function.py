"""Peaks and sums of this rank's columns, in one read. T rows, Vp local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.vocab_parallel import (
    VocabShard,
    accumulation_dtype,
    local_log_sum_exp,
    scaled_logits,
)
from megatron_ext.ops.implementation import Implementation, uses_triton
from megatron_ext.ops.launch import SWEEP_CONFIGS, LaunchConfig, chosen_config, small_block


class RowStatistics(NamedTuple):
    """Of this rank's real columns, not merged over shards: see ``merge_log_sum_exp``."""

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
    implementation: Implementation = "auto",
) -> RowStatistics:
    """Softmax statistics of each row, in fp32 (fp64 for fp64 logits). No graph, no collectives.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns. Padding counts for nothing,
            whatever it holds.
        members: bool [Vp]; a second peak and sum are those of its columns. None: the first again.
        read: bool [T]; the others are not read and have nothing, whatever they hold. None: all.
    """
    logits, width = logits.detach(), shard.valid_width
    if width and uses_triton(implementation, logits):
        return _by_kernel(logits, width, temperature, members, read)
    found = _by_torch(logits[:, :width], temperature, None if members is None else members[:width])
    if read is None:
        return found
    return RowStatistics(*(torch.where(read, part, torch.zeros_like(part)) for part in found))


def _by_torch(
    logits: torch.Tensor, temperature: float, members: torch.Tensor | None
) -> RowStatistics:
    rows, dtype = logits.shape[0], accumulation_dtype(logits.dtype)
    if not logits.shape[1]:
        empty = torch.zeros(2, rows, dtype=dtype, device=logits.device)
        return RowStatistics(empty, empty.clone(), empty[0].long())
    column = torch.empty(rows, dtype=torch.int64, device=logits.device)
    for part in row_slices(*logits.shape, device=logits.device):
        column[part] = scaled_logits(logits[part], temperature, None).argmax(dim=-1)
    whole = local_log_sum_exp(logits, temperature, None)
    chosen = whole if members is None else local_log_sum_exp(logits, temperature, ~members)
    peak, total = (torch.stack(parts) for parts in zip(whole, chosen, strict=True))
    return RowStatistics(peak, total, column)


def _by_kernel(
    logits: torch.Tensor,
    width: int,
    temperature: float,
    members: torch.Tensor | None,
    read: torch.Tensor | None,
) -> RowStatistics:
    from megatron_ext.ops.softmax_statistics.triton_kernels import row_statistics_kernel

    rows, held_width = logits.shape
    peak, total = torch.empty(2, 2, rows, dtype=torch.float32, device=logits.device)
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
        launch(chosen_config(key, SWEEP_CONFIGS, launch))
    if members is None:
        peak[1], total[1] = peak[0], total[0]
    return RowStatistics(peak, total, column)

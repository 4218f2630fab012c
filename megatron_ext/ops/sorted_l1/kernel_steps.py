"""Launches of the sorted L1's kernels. C' chunks of a slice, K candidates, T rows."""

from __future__ import annotations

from typing import Final

import torch

from megatron_ext.ops.launch import LaunchConfig, small_block
from megatron_ext.ops.model_rows import ModelRows
from megatron_ext.ops.sorted_l1.comparison import Largest, run_count

SELECTING: Final = LaunchConfig(2048, 4)
"""Configuration of the selection, the only one: its code takes long to compile. A thread has two
times 8 columns, for which one prefix sum does."""

WRITING: Final = LaunchConfig(4096, 8)
"""Configuration of kernels that may overwrite their input, which cannot be timed in place."""

_CANDIDATES: Final = LaunchConfig(1024, 4)


def capacity_of(places: int, width: int) -> int:
    """K, the number of a rank's candidates, which include its ``places`` largest columns.

    A quarter more than are compared: two counting passes then usually find a threshold, where one
    that leaves exactly ``places`` would take seven. And as many as fill the runs that are sorted.
    """
    count = min(places + max(places // 4, 16), max(width, 1))
    runs = run_count(count)
    return -(-count // runs) * runs


def select_by_kernel(
    model: ModelRows,
    chunks: slice,
    places: int,
    excluded: torch.Tensor | None,
    first_open: int = 0,
    *,
    by_logit: bool = False,
) -> Largest:
    """Candidates for the ``places`` largest mean probabilities of each chunk.

    Args:
        excluded: bool [Vp], columns that are no candidates, like padding.
        first_open: Columns before the first that is not excluded.
        by_logit: Chunks are single rows, and values stand for their logits: in their order, not
            negative, and equal where only the last two bits of fp32 differ.
    """
    from megatron_ext.ops.sorted_l1.selection_kernel import select_kernel

    count, width = chunks.stop - chunks.start, model.shard.valid_width
    capacity, device = capacity_of(places, model.shard.width), model.logits.device
    values = torch.full((count, capacity), -1.0, dtype=torch.float32, device=device)
    columns = torch.empty(count, capacity, dtype=torch.int32, device=device)
    rest = torch.empty(count, 1, dtype=torch.float32, device=device)

    if count:
        select_kernel[(count,)](
            model.logits,
            model.rows.order,
            model.rows.offsets,
            *((None, None) if by_logit else model.lse),
            excluded,
            values,
            columns,
            rest,
            chunks.start,
            model.logits.stride(0),
            first_open,
            width,
            model.shard.width,
            places,
            capacity,
            model.temperature,
            HAS_EXCLUDED=excluded is not None,
            HAS_TEMPERATURE=model.temperature != 1.0,
            BY_LOGIT=by_logit,
            BLOCK=small_block(width, SELECTING.block),
            num_warps=SELECTING.num_warps,
        )
    return Largest(values, columns, rest)


def keep_chosen(
    model: ModelRows,
    chunks: slice,
    columns: torch.Tensor,
    signs: torch.Tensor,
    kept: torch.Tensor,
    centre: torch.Tensor,
) -> None:
    """Fill ``centre`` with ``sum_v q_i[v] sign[v]`` of this rank's candidates.

    Args:
        columns: int32 [C', K]
        signs: int8 [C', K]
        kept: [T, K] in the logits' dtype, which receives the rows' logits at the candidates: they
            are needed after the gradient has overwritten them.
        centre: [T]; rows of other chunks stay as they are.
    """
    from megatron_ext.ops.sorted_l1.triton_kernels import keep_chosen_kernel

    if len(columns):
        keep_chosen_kernel[(len(columns),)](
            model.logits,
            model.rows.order,
            model.rows.offsets,
            *model.lse,
            columns,
            signs,
            kept,
            centre,
            chunks.start,
            model.logits.stride(0),
            columns.shape[1],
            model.temperature,
            HAS_TEMPERATURE=model.temperature != 1.0,
            BLOCK=small_block(columns.shape[1], _CANDIDATES.block),
            num_warps=_CANDIDATES.num_warps,
        )


def spread_centre(
    model: ModelRows,
    chunks: slice,
    centre: torch.Tensor,
    scale: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Write ``-q_i centre_i scale_c``, the part of all columns, into the rows of these chunks,
    with the gradient of their labels."""
    from megatron_ext.ops.sorted_l1.triton_kernels import spread_kernel

    if chunks.stop > chunks.start:
        spread_kernel[(chunks.stop - chunks.start,)](
            model.logits,
            gradient,
            model.rows.order,
            model.rows.offsets,
            *model.lse,
            centre,
            scale,
            *model.label_vectors(),
            chunks.start,
            model.logits.stride(0),
            gradient.stride(0),
            model.shard.width,
            model.shard.valid_width,
            model.temperature,
            HAS_TEMPERATURE=model.temperature != 1.0,
            BLOCK=small_block(model.shard.width, WRITING.block),
            num_warps=WRITING.num_warps,
        )


def write_chosen(
    model: ModelRows,
    chunks: slice,
    columns: torch.Tensor,
    signs: torch.Tensor,
    kept: torch.Tensor,
    centre: torch.Tensor,
    scale: torch.Tensor,
    gradient: torch.Tensor,
    *,
    weight: float = 1.0,
    base: torch.Tensor | None = None,
) -> None:
    """Write ``q_i (base_c + weight sign - centre_i) scale_c`` where a candidate has a sign, with
    the gradient of the rows' labels.

    Args:
        base: [C], slope of every column that is a candidate; None: 0.
    """
    from megatron_ext.ops.sorted_l1.triton_kernels import write_chosen_kernel

    if len(columns):
        write_chosen_kernel[(len(columns),)](
            kept,
            gradient,
            model.rows.order,
            model.rows.offsets,
            *model.lse,
            columns,
            signs,
            centre,
            base,
            scale,
            *model.label_vectors(),
            chunks.start,
            gradient.stride(0),
            columns.shape[1],
            weight,
            model.temperature,
            HAS_BASE=base is not None,
            HAS_TEMPERATURE=model.temperature != 1.0,
            BLOCK=small_block(columns.shape[1], _CANDIDATES.block),
            num_warps=_CANDIDATES.num_warps,
        )

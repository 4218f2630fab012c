"""Handing over a gradient that a forward wrote for announced weights. T rows, Vp columns."""

from __future__ import annotations

import torch

from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.unit_gradient.function import scale_rows_


def hand_over(
    gradient: torch.Tensor,
    got: torch.Tensor,
    announced: torch.Tensor | None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``gradient`` [T, Vp], scaled from what was announced to what was got, [T] both.

    In place, but for a backward that retains its graph: that one is handed a copy, since the next
    needs what the forward wrote. A row announced 0 holds 0 and stays as it is, unread. None: 1 was
    announced.
    """
    scale = got
    if announced is not None:
        scale = (got / announced).masked_fill_(announced == 0, 1.0)
    if graph_is_retained():
        return scale_rows_(gradient.clone(), scale, implementation)
    scale_rows_(gradient, scale, implementation)
    # Kernels write behind autograd's back; a reader of what it was before has to be told.
    torch.autograd.graph.increment_version(gradient)
    return gradient


def hand_over_chunks(
    gradient: torch.Tensor,
    got: torch.Tensor,
    announced: torch.Tensor | None,
    slots: torch.Tensor,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``hand_over`` where chunks got something and had something announced, [C] both.

    Args:
        slots: int64 [T], the chunk of each row, C for none. Rows of none hold 0, unread as well.
    """
    told = None if announced is None else _by_row(announced, slots)
    return hand_over(gradient, _by_row(got, slots), told, implementation)


def _by_row(values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[T] from [C], 1 in rows of no chunk."""
    return torch.cat([values, values.new_ones(1)])[slots]


def graph_is_retained() -> bool:
    """Whether the backward that is running keeps its graph; True where torch does not tell."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if tell is None else bool(tell())

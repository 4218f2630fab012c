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
    needs what the forward wrote. A row announced 0 stays 0. None: 1 was announced.
    """
    scale = got
    if announced is not None:
        scale = (got / announced).masked_fill_(announced == 0, 0.0)
    if graph_is_retained():
        return scale_rows_(gradient.clone(), scale, implementation)
    scale_rows_(gradient, scale, implementation)
    # Kernels write behind autograd's back; a reader of what it was before has to be told.
    torch.autograd.graph.increment_version(gradient)
    return gradient


def graph_is_retained() -> bool:
    """Whether the backward that is running keeps its graph; True where torch does not tell."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if tell is None else bool(tell())

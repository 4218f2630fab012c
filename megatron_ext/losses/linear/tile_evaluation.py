"""The weighted sum of objectives on one tile, and its gradient over the logits.

n rows, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_ext.losses.base import DistillationInputs, LossOutput, Objective


class Evaluated(NamedTuple):
    """All without a graph."""

    total: torch.Tensor
    """``sum over objectives: scale * loss_sum``."""

    outputs: dict[str, LossOutput]

    gradient: torch.Tensor | None
    """[n, Vp] of ``total``; None where it was not asked for."""


def evaluate_tile(
    objectives: Mapping[str, Objective],
    scales: Mapping[str, float | torch.Tensor],
    inputs: DistillationInputs,
    *,
    needs_gradient: bool,
) -> Evaluated:
    """Objectives on a tile's logits [1, n, Vp], which have no graph and can be overwritten.

    Collectives: those of the objectives, forward and backward.
    """
    leaf = inputs.student_logits.detach().requires_grad_(needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        on_leaf = replace(inputs, student_logits=leaf)
        outputs = {name: objective(on_leaf) for name, objective in objectives.items()}
        total = torch.stack([scales[name] * out.loss_sum for name, out in outputs.items()]).sum()
    gradient = None
    if needs_gradient:
        gradient = torch.autograd.grad(total, leaf, materialize_grads=True)[0].flatten(0, 1)
    found = {
        name: replace(output, loss_sum=output.loss_sum.detach()) for name, output in outputs.items()
    }
    return Evaluated(total.detach(), found, gradient)

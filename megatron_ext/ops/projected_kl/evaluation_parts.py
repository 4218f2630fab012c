"""What the evaluation by torch and the one by kernels share. T rows, C chunks, Vp local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.ops.projected_kl.learned_entries import LearnedEntries
from megatron_ext.ops.projected_kl.values import WeightedLabels


class ProjectedValues(NamedTuple):
    """[C] each, over all shards."""

    value: torch.Tensor
    """D_c."""

    entropy: torch.Tensor
    agreement: torch.Tensor
    rest_mass: torch.Tensor


class RequestedOutputs(NamedTuple):
    """Where gradients go."""

    gradient: torch.Tensor | None
    grad_scale: torch.Tensor
    """[C] fp32 or fp64."""

    cross_entropy: WeightedLabels | None
    learned: LearnedEntries | None
    entry_gradient: torch.Tensor | None

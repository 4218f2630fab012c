"""Distillation and cross-entropy side by side, each with a count of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, LossOutput, Objective
from megatron_ext.losses.next_token import NextTokenLoss


class DistillationOutput(NamedTuple):
    """Unweighted terms; a term whose weight is zero is not computed."""

    kd: LossOutput | None
    """The distillation objective's."""

    ce: LossOutput | None
    """Next-token cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationLoss:
    """``kd_weight * KD + ce_weight * CE``, where each term is a global sum over a global count.

    The counts (chunks, labels) are reduced over all microbatches and ranks by the trainer, so the
    terms stay apart here and ``combine`` weighs them once the trainer knows both.

    Raises:
        LossError: A weight is negative or not finite, or both are zero.
    """

    kd_objective: Objective
    """From ``LOSS_REGISTRY``."""

    kd_weight: float = 1.0
    """Zero: cross-entropy alone."""

    ce_weight: float = 0.1
    """Zero: distillation alone."""

    def __post_init__(self) -> None:
        weights = (self.kd_weight, self.ce_weight)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise LossError(
                "the weights of distillation and cross-entropy must be finite and not negative",
                got=weights,
                expected="at least one above 0",
            )

    def __call__(self, inputs: DistillationInputs) -> DistillationOutput:
        return DistillationOutput(
            kd=self.kd_objective(inputs) if self.kd_weight else None,
            ce=NextTokenLoss()(inputs) if self.ce_weight else None,
        )

    def combine(
        self,
        output: DistillationOutput,
        *,
        kd_count: torch.Tensor | int,
        ce_count: torch.Tensor | int,
    ) -> torch.Tensor:
        """This rank's share of the loss: fp32 scalar with a graph. No collectives.

        Args:
            kd_count: Chunks in the whole batch; at least 1 where there are none, as the sum is 0.
            ce_count: Trained labels in the whole batch; likewise.
        """
        shares = [
            weight * term.loss_sum / count
            for weight, term, count in (
                (self.kd_weight, output.kd, kd_count),
                (self.ce_weight, output.ce, ce_count),
            )
            if term is not None
        ]
        return torch.stack(shares).sum()

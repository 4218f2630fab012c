"""What becomes of an iteration whose loss or gradient is NaN or infinite; alike on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import MegatronExtError
from megatron_ext.losses.diagnostics import FiniteCheck
from megatron_ext.training.config import TrainingConfig
from megatron_ext.training.fault_counts import FaultCounts


class DivergedError(MegatronExtError, RuntimeError):
    """The loss or the gradient is not a finite number."""


@dataclass(frozen=True, slots=True)
class NonFinitePolicy:
    """``training.nan_policy``: end the run, or leave the iteration out and count it.

    Args:
        config: The run's.
        groups: Of this rank.
        counts: Where skips are counted.
    """

    config: TrainingConfig
    groups: ProcessGroups
    counts: FaultCounts

    def check_loss(self, loss: float, predictions: FiniteCheck, *, iteration: int) -> bool:
        """Whether the iteration may go on; what the last stage knows holds on every rank.

        Collectives: one broadcast over ``pp``.

        Raises:
            LossError: A model predicts NaN or infinity, and that is one time too many.
            DivergedError: The loss is not finite; likewise.
        """
        shared = torch.tensor([loss, 0.0, 0.0], dtype=torch.float64, device=self.groups.device)
        shared[1:] = predictions.bad
        value, *bad = self.groups.broadcast_from_last_stage(shared).tolist()
        if not any(bad) and math.isfinite(value):
            return True
        if not self._skips():
            FiniteCheck(torch.tensor(bad)).raise_if_bad(where=f"iteration {iteration}")
            raise self._error("loss", value, iteration)
        return False

    def check_gradient(self, grad_norm: float, *, iteration: int) -> bool:
        """Whether the gradient, whose norm all ranks know, was applied; no collective.

        Raises:
            DivergedError: It is not finite, and that is one time too many.
        """
        if math.isfinite(grad_norm):
            self.counts.skips_in_a_row = 0
            return True
        if not self._skips():
            raise self._error("gradient norm", grad_norm, iteration)
        return False

    def _skips(self) -> bool:
        """Count a skip; whether it is allowed."""
        if self.config.nan_policy == "stop":
            return False
        self.counts.skipped_iterations += 1
        self.counts.skips_in_a_row += 1
        return self.counts.skips_in_a_row <= self.config.max_consecutive_skips

    def _error(self, what: str, value: float, iteration: int) -> DivergedError:
        in_a_row = self.counts.skips_in_a_row
        return DivergedError(
            f"the {what} is not finite at iteration {iteration}",
            got=f"{value}, {in_a_row} iterations in a row" if in_a_row else value,
            fix="start another run with a lower optimizer.lr; initial_checkpoint may name a "
            "checkpoint of this one",
        )


def finite_only(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without what is no number, of which JSON has none."""
    return {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, float) or math.isfinite(value)
    }

"""What a row of the log says about time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.training.data.global_batches import GlobalBatches
from megatron_ext.training.watching.memory_use import peak_memory_bytes
from megatron_ext.training.watching.step_clock import StepClock


class StepWatch:
    """Reads a clock once a step.

    Args:
        clock: What the trainer's phases are counted by.
        batches: Whose waiting is told.
    """

    def __init__(self, clock: StepClock, batches: GlobalBatches) -> None:
        self._clock = clock
        self._batches = batches
        self._waited = batches.waited

    def row(self, metrics: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """``seconds/PHASE`` since the row before, trained tokens a second, and peak memory.

        ``seconds/waiting`` is the part of ``seconds/data`` in which no sample was at hand.

        Args:
            metrics: The row's others, with the ``tokens`` of the step over all replicas.
            seconds: The step's.
        """
        # A stream that was opened again counts from 0.
        waited = self._batches.waited
        waiting = waited - self._waited if waited >= self._waited else waited
        self._waited = waited
        phases = {"waiting": waiting, **self._clock.read()}
        return {
            "tokens_per_second": metrics["tokens"] / seconds,
            "memory_bytes": peak_memory_bytes(),
            **{f"seconds/{name}": value for name, value in phases.items()},
        }

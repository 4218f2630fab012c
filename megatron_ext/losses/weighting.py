"""How distillation weighs against cross-entropy. A term is ``kd`` or ``ce``.

Weights are plain numbers, set before a global batch from what earlier ones have shown, and the same
for all its microbatches and ranks. So a run is resumed exactly from ``state_dict``, and the loss
does not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from megatron_ext.errors import LossError

Observed = Literal["nothing", "means", "gradient_norms"]


class LossWeighting(Protocol):
    """Weights of the terms of a loss, step after step."""

    @property
    def observes(self) -> Observed:
        """What ``observe`` wants after each step."""

    def weights(self, step: int) -> dict[str, float]:
        """Weight of each term at ``step``, counted from 0."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Take in a global batch: for each term its unweighted mean over all of it, or the norm of
        its gradient; the same numbers on every rank that computes the loss."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know; plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWeighting:
    """The same weights at every step."""

    kd: float = 1.0
    ce: float = 0.1

    def __post_init__(self) -> None:
        _check_weights(kd=self.kd, ce=self.ce)

    @property
    def observes(self) -> Observed:
        return "nothing"

    def weights(self, step: int) -> dict[str, float]:
        return {"kd": self.kd, "ce": self.ce}

    def observe(self, values: Mapping[str, float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


Schedule = Literal["constant", "linear", "reverse_linear", "cosine", "reverse_cosine"]
"""Factor of a weight over the steps of a run: ``linear`` and ``reverse_cosine`` rise from 0 to 1,
``cosine`` and ``reverse_linear`` fall from 1 to 0. The names are those of tokenkit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledWeighting:
    """Weights times a factor of the step, which is 0 or 1 at the first and at the last."""

    steps: int
    """Steps of the run; later ones keep the last factor."""

    kd: float = 1.0
    ce: float = 0.1
    kd_schedule: Schedule = "constant"
    ce_schedule: Schedule = "constant"

    def __post_init__(self) -> None:
        _check_weights(kd=self.kd, ce=self.ce)
        if self.steps < 1:
            raise LossError("a schedule of weights has no step", got=self.steps, expected=">= 1")
        for schedule in (self.kd_schedule, self.ce_schedule):
            if schedule not in _FACTORS:
                raise LossError(
                    "unknown schedule of a weight",
                    got=repr(schedule),
                    expected=f"one of {', '.join(_FACTORS)}",
                )

    @property
    def observes(self) -> Observed:
        return "nothing"

    def weights(self, step: int) -> dict[str, float]:
        progress = min(step / (self.steps - 1), 1.0) if self.steps > 1 else 1.0
        return {
            "kd": self.kd * _FACTORS[self.kd_schedule](progress),
            "ce": self.ce * _FACTORS[self.ce_schedule](progress),
        }

    def observe(self, values: Mapping[str, float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


_FACTORS = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: progress,
    "reverse_linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
    "reverse_cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2,
}


@dataclass(slots=True, kw_only=True)
class MatchedWeighting:
    """KD scaled to the size of cross-entropy: ``ce * CE + ce * r * KD``.

        r = clamp(EMA|CE| / EMA|KD|, lowest, highest)

    EMA is the exponential moving average of the global means of the steps before. Both averages
    begin together, so that the bias of their beginning cancels. Before the first observation, and
    while both are 0, r is 1 (clamped).

    The original (NeMo RL ``dynamic_loss_scaling``) sets ``r = |CE| / |KD|`` of the very microbatch
    on the very rank, unclamped. Then r * KD is always as large as CE, whatever KD says: its value
    carries no information, a hard microbatch counts no more than an easy one, one whose KD is
    nearly 0 gets an unbounded gradient, and the result changes with the layout. The average keeps
    the intention, which is the scale, and lets single batches differ.
    """

    ce: float = 1.0
    """Weight of cross-entropy; KD is matched to it."""

    decay: float = 0.99
    """Share of the average that a step keeps; 0: the step before alone."""

    lowest: float = 0.01
    highest: float = 100.0
    _means: dict[str, float] = field(default_factory=lambda: {"kd": 0.0, "ce": 0.0}, repr=False)

    def __post_init__(self) -> None:
        _check_weights(ce=self.ce)
        if not 0 <= self.decay < 1:
            raise LossError("decay of a moving average", got=self.decay, expected="in [0, 1)")
        if not 0 < self.lowest <= self.highest < math.inf:
            raise LossError(
                "bounds of the ratio of cross-entropy to distillation",
                got=f"{self.lowest} to {self.highest}",
                expected="0 < lowest <= highest",
            )

    @property
    def observes(self) -> Observed:
        return "means"

    def weights(self, step: int) -> dict[str, float]:
        kd, ce = self._means["kd"], self._means["ce"]
        # 0 / 0 says nothing; 1 / 0 is the highest.
        ratio = (math.inf if ce else 1.0) if kd == 0 else ce / kd
        return {"kd": self.ce * min(max(ratio, self.lowest), self.highest), "ce": self.ce}

    def observe(self, values: Mapping[str, float]) -> None:
        """See ``LossWeighting``. A step without one of the terms, as one without a chunk, is left
        out.

        Raises:
            LossError: A mean that is not finite.
        """
        if not {"kd", "ce"} <= set(values):
            return
        _check_finite("mean", values)
        for name, mean in self._means.items():
            self._means[name] = self.decay * mean + (1 - self.decay) * abs(values[name])

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self._means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = {name: float(state["means"][name]) for name in ("kd", "ce")}


def _check_weights(**weights: float) -> None:
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise LossError(
                f"the weight of {name} cannot be used", got=weight, expected="a finite number, >= 0"
            )


def _check_finite(what: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise LossError(f"the {what} of the term {name} is not finite", got=value)

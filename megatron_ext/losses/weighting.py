"""Weighting of distillation (``kd``) against cross-entropy (``ce``), the terms of a loss.

Weights are plain numbers, set before a global batch from observations of earlier ones, and the same
for all its microbatches and ranks. A run is therefore resumed exactly from ``state_dict``, and the
loss does not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.errors import LossError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Observed = Literal["nothing", "means", "gradient_norms"]


class LossWeighting(Protocol):
    """Weights of the terms of a loss, step after step."""

    @property
    def observes(self) -> Observed:
        """Kind of values that ``observe`` takes after each step."""

    def weights(self, step: int) -> dict[str, float]:
        """Weight of each term at ``step``, counted from 0."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Update the weights from a global batch: the unweighted mean of each term over all of it,
        or the norm of its gradient; the same numbers on every rank that computes the loss."""

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs; plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``."""


class _PlannedWeighting:
    """Weights that nothing observed changes."""

    __slots__ = ()

    @property
    def observes(self) -> Observed:
        return "nothing"

    def observe(self, values: Mapping[str, float]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWeighting(_PlannedWeighting):
    """The same weights at every step."""

    kd: float = 1.0
    ce: float = 0.1

    def __post_init__(self) -> None:
        _check_weights(kd=self.kd, ce=self.ce)

    def weights(self, step: int) -> dict[str, float]:
        return {"kd": self.kd, "ce": self.ce}


Schedule = Literal["constant", "linear", "reverse_linear", "cosine", "reverse_cosine"]
"""Factor of a weight over the steps of a run: ``linear`` and ``reverse_cosine`` rise from 0 to 1,
``cosine`` and ``reverse_linear`` fall from 1 to 0. The names are those of tokenkit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledWeighting(_PlannedWeighting):
    """Weights times a scheduled factor, which is 0 or 1 at the first and at the last step."""

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

    def weights(self, step: int) -> dict[str, float]:
        progress = min(step / (self.steps - 1), 1.0) if self.steps > 1 else 1.0
        return {
            "kd": self.kd * _FACTORS[self.kd_schedule](progress),
            "ce": self.ce * _FACTORS[self.ce_schedule](progress),
        }


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

    The original (NeMo RL ``dynamic_loss_scaling``) sets ``r = |CE| / |KD|`` of the same microbatch
    on the same rank, unclamped. Then r * KD is always as large as CE, whatever KD is: its value
    carries no information, a hard microbatch counts no more than an easy one, one whose KD is
    nearly 0 gets an unbounded gradient, and the result changes with the layout. The average keeps
    the intended scale and lets single batches differ.
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
        _check_decay(self.decay)
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
        # Without an observation 1; a KD of 0 alone gives the highest ratio.
        ratio = (math.inf if ce else 1.0) if kd == 0 else ce / kd
        return {"kd": self.ce * min(max(ratio, self.lowest), self.highest), "ce": self.ce}

    def observe(self, values: Mapping[str, float]) -> None:
        """See ``LossWeighting``. A step that lacks a term, for want of a chunk, is left out.

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


def _check_decay(decay: float) -> None:
    if not 0 <= decay < 1:
        raise LossError("decay of a moving average", got=decay, expected="in [0, 1)")


def _check_finite(what: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise LossError(f"the {what} of the term {name} is not finite", got=value)


@dataclass(slots=True, kw_only=True)
class GradientMagnitudeWeighting:
    """``w_i = (1 / |g_i|) / sum_j (1 / |g_j|)``: terms pull at the last layer with equal force.

    ``g_i`` is the gradient of term i's mean over the whole global batch with regard to a few
    parameters, those of the last layer (``LayerGradients``). The weights add up to 1, so that one
    term alone has weight 1. Weights that the user gives a term would cancel, so it takes none.

    This is the approximate, magnitude-preserving form of GradMag in tokenkit (ALM, arXiv
    2503.20083), with two differences. The original weighs each microbatch by its own gradients;
    here weights come from the steps before, through a moving average of the norms, so that they are
    the same for all microbatches and ranks. And it adds 1e-8 to a norm; here a step in which a term
    has no gradient is left out, since a weight of 1e8 would leave nothing to the others.
    """

    terms: tuple[str, ...] = ("kd", "ce")

    decay: float = 0.9
    """Share of the average that a step keeps; 0: the step before alone."""

    _norms: dict[str, float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.terms:
            raise LossError("there is no term to weigh")
        _check_decay(self.decay)

    @property
    def observes(self) -> Observed:
        return "gradient_norms"

    def weights(self, step: int) -> dict[str, float]:
        """Equal weights before the first observation."""
        inverse = {name: 1 / self._norms.get(name, 1.0) for name in self.terms}
        total = sum(inverse.values())
        return {name: value / total for name, value in inverse.items()}

    def observe(self, values: Mapping[str, float]) -> None:
        """See ``LossWeighting``. A step without a gradient of some term is left out.

        Raises:
            LossError: A norm that is not finite.
        """
        norms = [values.get(name, 0.0) for name in self.terms]
        if not all(map(math.isfinite, norms)):
            raise LossError("the norm of a term's gradient is not finite", got=dict(values))
        if not all(norms):
            return
        keep = self.decay if self._norms else 0.0
        for name, norm in zip(self.terms, norms, strict=True):
            self._norms[name] = keep * self._norms.get(name, 0.0) + (1 - keep) * norm

    def state_dict(self) -> dict[str, Any]:
        return {"norms": dict(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norms = {name: float(norm) for name, norm in state["norms"].items()}


class LayerGradients:
    """Gradients of each term with regard to a few parameters, added up over a global batch.

    Costs a backward pass from the loss to the parameters (the head and the last layer) for each
    term and microbatch, fp32 copies of their gradients, and at the end one all-reduce of these over
    the data-parallel group. Measure every few steps if that is too much.

    Args:
        parameters: Matrices of the last layer, on the last pipeline stage. Those that megatron-core
            marks ``tensor_model_parallel`` are this rank's shards, others are the same on all
            tensor-parallel ranks. Their gradients must come through autograd: not with
            ``gradient_accumulation_fusion``, which writes them to ``main_grad``.
        terms: Names of the terms.
        tp_group: Ranks that share the parameters; None for one.
        dp_group: Replicas and context-parallel ranks; None for one.

    Raises:
        LossError: No parameter, or one with a partial gradient (``sequence_parallel``).
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        terms: Sequence[str],
        *,
        tp_group: ProcessGroup | None = None,
        dp_group: ProcessGroup | None = None,
    ) -> None:
        if not parameters:
            raise LossError("gradients of the last layer need a parameter", got="none")
        if any(getattr(parameter, "sequence_parallel", False) for parameter in parameters):
            raise LossError(
                "a parameter has a partial gradient on each sequence-parallel rank",
                fix="leave norms and biases out; the layer's matrices are enough",
            )
        self._parameters = list(parameters)
        self._terms = tuple(terms)
        self._groups = (tp_group, dp_group)
        self._sums = self._zeros()

    def add(self, terms: Mapping[str, torch.Tensor]) -> None:
        """Add one microbatch.

        Args:
            terms: Share of each term's mean (``CombinedOutput.terms``), with a graph, which is
                kept. Collectives: those of the backward passes, term after term.

        Raises:
            LossError: A term that no parameter gets a gradient from.
        """
        for row, name in zip(self._sums, self._terms, strict=True):
            grads = torch.autograd.grad(
                terms[name], self._parameters, retain_graph=True, allow_unused=True
            )
            if all(grad is None for grad in grads):
                raise LossError(
                    "no measured parameter gets a gradient from a term of the loss",
                    where=name,
                    fix="give parameters of the last layer of the last pipeline stage",
                )
            start = 0
            for parameter, grad in zip(self._parameters, grads, strict=True):
                stop = start + parameter.numel()
                if grad is not None:
                    row[start:stop] += grad.flatten()
                start = stop

    def norms(self) -> dict[str, float]:
        """Norm of each term's gradient over all shards and replicas; resets the sums.

        Collectives: one all-reduce of 4 bytes a parameter and term over ``dp_group``, one of 4
        bytes a term over ``tp_group``. Waits for the device.
        """
        tp_group, dp_group = self._groups
        grads = all_reduce_sum(self._sums, dp_group).square()
        self._sums = self._zeros()
        squares = grads.split([parameter.numel() for parameter in self._parameters], dim=1)
        sharded, shared = grads.new_zeros(2, len(self._terms)).unbind()
        for parameter, square in zip(self._parameters, squares, strict=True):
            total = square.sum(dim=1)
            if getattr(parameter, "tensor_model_parallel", False):
                sharded = sharded + total
            else:
                shared = shared + total
        norms = (all_reduce_sum(sharded, tp_group) + shared).sqrt()
        return dict(zip(self._terms, norms.tolist(), strict=True))

    def _zeros(self) -> torch.Tensor:
        """[terms, elements of all parameters] fp32"""
        count = sum(parameter.numel() for parameter in self._parameters)
        device = self._parameters[0].device
        return torch.zeros(len(self._terms), count, dtype=torch.float32, device=device)

"""Terms weighed by how strongly they pull at the last layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.errors import LossError
from megatron_ext.losses.weighting import Observed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        if not 0 <= self.decay < 1:
            raise LossError("decay of a moving average", got=self.decay, expected="in [0, 1)")

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

    Costs for each term and microbatch a backward pass from the loss to the parameters (the head and
    the last layer), fp32 copies of their gradients, and at the end one all-reduce of these over the
    data-parallel group. Measure every few steps if that is too much.

    Args:
        parameters: Matrices of the last layer, on the last pipeline stage. Those that megatron-core
            marks ``tensor_model_parallel`` are this rank's shards, others are the same on all
            tensor-parallel ranks. Their gradients must come through autograd: not with
            ``gradient_accumulation_fusion``, which writes them elsewhere.
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
            terms: Each term's share of its mean (``CombinedOutput.terms``), with a graph, which is
                kept. Collectives: those of the backward passes, term after term.

        Raises:
            LossError: A term that no parameter has a gradient of.
        """
        for row, name in zip(self._sums, self._terms, strict=True):
            grads = torch.autograd.grad(
                terms[name], self._parameters, retain_graph=True, allow_unused=True
            )
            if all(grad is None for grad in grads):
                raise LossError(
                    "no parameter that gradients are measured on leads to a term of the loss",
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
        """Norm of each term's gradient over all shards and replicas; begins anew.

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

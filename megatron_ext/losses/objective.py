"""An objective: its loss and gradient, and what it says of itself.

B batch, Ts tokens, Vp local columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput, Over
from megatron_ext.ops.unit_gradient import kept_gradient
from megatron_ext.projection.speller import ProjectionMethod
from megatron_ext.registry import Registry

Scale = float | torch.Tensor
"""What a sum is multiplied by: its weight over its global count. A tensor is a scalar without a
graph."""

TargetForm = Literal["label", "topk", "hidden"]
"""Kind of targets that a cache keeps, or that a remote teacher sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an objective reads that does not follow from logits, labels and alignment."""

    projection: ProjectionMethod | None = None
    """How the projection is built, where the run is not given one; None: it needs none."""

    shard: bool = False
    """The projection itself."""

    match: bool = False
    """The tokens that both vocabularies have, by the projection."""

    min_share: float | None = None
    """Least share of a token in the match, see ``SparseProjection.partition``."""

    boundary: bool = False
    """The tokens that begin a word."""

    completions: bool = False
    """What both models can say in each chunk."""

    hidden: bool = False
    """The student's last hidden states and head."""

    same_tokenizer: bool = False
    """A teacher that reads the student's tokens."""


class Objective(ABC):
    """What a student learns from one teacher, or from its labels.

    A subclass is a frozen dataclass whose fields are the options. It implements ``compute``, or
    derives from ``FusedObjective``; it says what it reads and how its sum can be cut by overriding
    the properties below; and one line registers it:
    ``LOSS_REGISTRY.register("name", TheObjective)``. Nothing else knows of it.
    """

    __slots__ = ()

    name: ClassVar[str]
    """In ``LOSS_REGISTRY``, for errors."""

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        """The loss of one microbatch; ``loss_sum`` has a graph. Collectives: see the class.

        A run computes the same, if with the cross-entropy in one pass (``losses/plan.py``).
        """
        return self.compute(inputs)

    @abstractmethod
    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """The loss under autograd."""

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """int64 scalar: ``LossOutput.count`` of these inputs, before the student has run.

        Labels, or chunks that are not masked; an objective that leaves out others says so.

        Raises:
            LossError: Chunks without an alignment.
        """
        if self.sums_over == "tokens":
            return (known.labels != IGNORE_INDEX).sum()
        return known.chunks()

    @property
    def needs(self) -> Needs:
        """What it reads; a projection and the match unless it says otherwise."""
        return Needs(projection="retokenized", shard=True, match=True)

    @property
    def sums_over(self) -> Over:
        """Chunks of an alignment, or the student's labels."""
        return "chunks"

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """Forms of cached or remote targets that it takes at its options, the smallest first."""
        return ("hidden",)

    @property
    def why_no_context_parallel(self) -> str | None:
        """Why it needs whole sequences, which context-parallel ranks do not have; None: it does
        not, since it is a sum over chunks of what their rows, and the row after each, say."""
        return None

    @property
    def why_no_linear_form(self) -> str | None:
        """Why it has no linear form; None: each chunk's or label's part of the sum depends on its
        own rows of logits alone."""
        return self.why_no_context_parallel or "it needs all positions, or hidden states"

    @property
    def learns_projection(self) -> bool:
        """Whether a projection's entries get a gradient from it."""
        return False


class Evaluated(NamedTuple):
    """What one pass over the logits finds, without a graph."""

    output: LossOutput

    token_loss: torch.Tensor | None
    """[B Ts] cross-entropy of each label; None where it was not asked for."""


class FusedObjective(Objective):
    """An objective whose value and gradient come from one pass over the logits.

    The pass takes the cross-entropy of the same rows along.
    """

    __slots__ = ()

    @abstractmethod
    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """The loss, and the gradient into memory of the caller's.

        Args:
            inputs: ``student_logits`` have no graph.
            scale: What the objective's sum is multiplied by in the gradient.
            ce_scale: The same of the cross-entropy's; None: it is not asked for.
            gradient: [B Ts, Vp], receives the gradient of the scaled sums, rounded once; can be the
                logits. None: nothing is computed for it.

        Collectives: those of the operation, see the class.
        """

    def fuses(self, inputs: DistillationInputs) -> bool:
        """Whether ``evaluate`` has these inputs at these options; else they run under autograd."""
        return True

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        """The loss of one microbatch; ``loss_sum`` has a graph. Collectives: see the class.

        The gradient is written in the forward, for ``inputs.grad_scale``.
        """
        if not self.fuses(inputs):
            return self.compute(inputs)
        output: LossOutput | None = None

        def evaluate(rows: torch.Tensor, gradient: torch.Tensor | None) -> tuple[torch.Tensor]:
            nonlocal output
            own = replace(inputs, student_logits=rows.view(inputs.student_logits.shape))
            output = self.evaluate(own, scale=inputs.grad_scale, gradient=gradient).output
            return (output.loss_sum,)

        (loss_sum,) = kept_gradient(inputs.student_logits, evaluate, grad_scale=inputs.grad_scale)
        assert output is not None
        return replace(output, loss_sum=loss_sum)

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """The loss under autograd, of inputs that ``evaluate`` does not take."""
        raise NotImplementedError(f"{type(self).__name__} evaluates everything")


def label_scales(inputs: DistillationInputs, scale: Scale) -> torch.Tensor:
    """fp32 [B Ts]: ``scale`` at every label, 0 where there is none."""
    return torch.where(inputs.labels.flatten() != IGNORE_INDEX, 1.0, 0.0) * scale


LOSS_REGISTRY: Registry[Callable[..., Objective]] = Registry("distillation objective")
"""Name -> constructor taking the objective's options as keywords."""

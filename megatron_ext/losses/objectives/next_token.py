"""Next-token cross-entropy. B batch, T tokens, Vp local columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from megatron_ext.losses.base import DistillationInputs, LossOutput, Over
from megatron_ext.losses.checks import check_student
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    Evaluated,
    FusedObjective,
    Scale,
    label_factors,
)
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.sums import label_sums
from megatron_ext.ops.token_log_prob import evaluate_cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokenLoss(FusedObjective):
    """``-sum_t log p(label_t)`` over labels other than ``IGNORE_INDEX``, counting those labels.

    Metric: ``accuracy``, the share of labels with the largest logit, the first of equals. Three
    all-reduces forward, 24 B T bytes a rank, none backward. A ``FusedObjective`` beside it can
    compute it in its own pass.

    Raises:
        LossError: An unknown implementation; calling it with logits, labels and shard of different
            shapes. NaN logits and labels beyond the vocabulary make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "next_token"
    summary: ClassVar[str] = (
        "no teacher: next-token cross-entropy alone, for teachers and baselines"
    )

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/launch``."""

    def __post_init__(self) -> None:
        check_implementation("next_token", self.implementation)

    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """``evaluate_cross_entropy``; its collectives."""
        assert ce_scale is None
        check_student(inputs)
        values = evaluate_cross_entropy(
            inputs.student_logits.flatten(0, 1),
            inputs.labels.flatten(),
            inputs.student_shard,
            grad_scale=label_factors(inputs, scale),
            gradient=gradient,
            implementation=self.implementation,
        )
        output = self.output(inputs, values.row_loss, values.top_column)
        # There is no teacher.
        told = values.log_sum, values.log_sum[:0]
        return Evaluated(replace(output, bad=partial(self.flags, inputs, *told, is_cut=True)), None)

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """True: rows with a label are normalised, and one of NaN or +inf has no sum."""
        return True

    def output(
        self, inputs: DistillationInputs, row_loss: torch.Tensor, top_column: torch.Tensor
    ) -> LossOutput:
        """Output from the loss at every position.

        Args:
            row_loss: [B Ts], 0 at positions without a label.
            top_column: int64 [B Ts], the token of the largest logit.
        """
        labels = inputs.labels.flatten()
        loss, hits, number = label_sums(
            row_loss, top_column, labels, implementation=self.implementation
        )
        return LossOutput(loss_sum=loss, count=number, metrics={"accuracy": (hits, number)})

    @property
    def sums_over(self) -> Over:
        """Labels."""
        return "tokens"

    @property
    def why_no_linear_form(self) -> str | None:
        """None: each label is a term."""
        return None


LOSS_REGISTRY.register("next_token", NextTokenLoss)

"""Next-token cross-entropy. B batch, T tokens, Vp local columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses.base import LOSS_REGISTRY, DistillationInputs, LossOutput
from megatron_ext.losses.checks.input_check import check_student
from megatron_ext.ops.implementation import Implementation, check_implementation
from megatron_ext.ops.token_log_prob import token_prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokenLoss:
    """``-sum_t log p(label_t)`` over labels other than ``IGNORE_INDEX``, counting those labels.

    Metric: ``accuracy``, the labels that are the first largest logit. Three all-reduces forward,
    24 B T bytes a rank, none backward. It writes a gradient of its own; objectives that read the
    same logits have the cross-entropy as a term of theirs (``vocab_kl_with_ce``).

    Raises:
        LossError: An unknown implementation; calling it with logits, labels and shard of different
            shapes. NaN logits and labels beyond the vocabulary make ``loss_sum`` NaN.
    """

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/implementation``."""

    def __post_init__(self) -> None:
        check_implementation("next_token", self.implementation)

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        check_student(inputs)
        labels = inputs.labels.flatten()
        out = token_prediction(
            inputs.student_logits.flatten(0, 1),
            labels,
            inputs.student_shard,
            announced=torch.where(labels != IGNORE_INDEX, -1.0, 0.0) * inputs.announced,
            implementation=self.implementation,
        )
        return self.output(inputs, -out.log_prob, out.top_column)

    def output(
        self, inputs: DistillationInputs, row_loss: torch.Tensor, top_column: torch.Tensor
    ) -> LossOutput:
        """The output of a loss at every position, 0 at those without a label, [B Ts].

        Args:
            top_column: int64 [B Ts], the token of the largest logit.
        """
        labels = inputs.labels.flatten()
        trained = labels != IGNORE_INDEX
        count = trained.sum()
        hits = trained & (top_column == labels)
        return LossOutput(
            loss_sum=row_loss.sum(),
            count=count,
            metrics={"accuracy": (hits.sum().to(row_loss.dtype), count)},
        )


LOSS_REGISTRY.register("next_token", NextTokenLoss)

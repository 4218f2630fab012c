"""Next-token cross-entropy. B batch, T tokens, Vp local columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import vocab_argmax
from megatron_ext.losses.base import LOSS_REGISTRY, DistillationInputs, LossOutput
from megatron_ext.losses.checks.input_check import check_student
from megatron_ext.ops.token_log_prob import token_log_prob


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokenLoss:
    """``-sum_t log p(label_t)`` over labels other than ``IGNORE_INDEX``, counting those labels.

    Metric: ``accuracy``, the labels that are the first largest logit. Five
    all-reduces of [B T] forward, none backward. It keeps no log-probabilities that the projected KL
    could share: both recompute them from the logits and a log-sum-exp [B T].

    Raises:
        LossError: Calling it with logits, labels and shard of different shapes. NaN logits and
            labels beyond the vocabulary make ``loss_sum`` NaN.
    """

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        check_student(inputs)
        logits, labels = inputs.student_logits.flatten(0, 1), inputs.labels.flatten()
        log_prob = token_log_prob(logits, labels, inputs.student_shard)
        return self.output(inputs, -log_prob, vocab_argmax(logits, inputs.student_shard))

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

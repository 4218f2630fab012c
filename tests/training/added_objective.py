"""An objective that a user adds: one class, registered by one line."""

from dataclasses import dataclass

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses import LOSS_REGISTRY, LossOutput, Needs, Objective
from megatron_ext.ops.token_log_prob import token_log_prob


@dataclass(frozen=True, slots=True, kw_only=True)
class BrierLoss(Objective):
    """``sum_t weight (1 - q(label_t))^2`` over labels, counting them."""

    name = "brier"

    weight: float = 1.0

    def compute(self, inputs):
        labels = inputs.labels.flatten()
        log_q = token_log_prob(inputs.student_logits.flatten(0, 1), labels, inputs.student_shard)
        trained = labels != IGNORE_INDEX
        loss = torch.where(trained, self.weight * (1 - log_q.exp()).square(), 0.0)
        return LossOutput(loss_sum=loss.sum(), count=trained.sum())

    @property
    def needs(self):
        return Needs()

    @property
    def sums_over(self):
        return "tokens"


def register():
    if BrierLoss.name not in LOSS_REGISTRY:
        LOSS_REGISTRY.register(BrierLoss.name, BrierLoss)

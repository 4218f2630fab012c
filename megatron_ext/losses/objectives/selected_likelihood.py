"""Objectives on a few tokens of each row and the rest, evaluated with the cross-entropy.

T rows, K tokens, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_ext.losses.base import DistillationInputs, LossOutput
from megatron_ext.losses.objective import Evaluated, Scale
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.selected_tokens import (
    SelectedTokens,
    evaluate_selected_tokens,
    write_selected_gradient,
)

Compare = Callable[[torch.Tensor, SelectedTokens], LossOutput]
"""Function of log-probabilities [T, K' + 1] with a graph, and of what was found of the rows."""


def evaluate_selected(
    inputs: DistillationInputs,
    token_id: torch.Tensor,
    compare: Compare,
    *,
    temperature: float,
    scale: Scale,
    ce_scale: Scale | None,
    gradient: torch.Tensor | None,
    with_top_column: bool = False,
    implementation: Implementation,
) -> Evaluated:
    """``FusedObjective.evaluate`` of an objective that reads the student at ``token_id``.

    The cross-entropy is that of one more token: a label that is not among the others.
    Collectives: those of ``evaluate_selected_tokens``, forward.

    Args:
        token_id: int64 [T, K], each once in a row, negative for none.
        temperature: 1 with the cross-entropy.
        with_top_column: Whether ``compare`` reads the largest columns.
    """
    logits, shard = inputs.student_logits.flatten(0, 1), inputs.student_shard
    labels = None if ce_scale is None else inputs.labels.flatten()
    found = evaluate_selected_tokens(
        logits,
        token_id,
        shard,
        labels=labels,
        temperature=temperature,
        with_top_column=labels is not None or with_top_column,
        implementation=implementation,
    )
    needs_gradient = gradient is not None
    log_prob = found.log_prob.requires_grad_(needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        output = compare(log_prob, found)
    if gradient is not None:
        (grad,) = torch.autograd.grad(output.loss_sum, log_prob, materialize_grads=True)
        write_selected_gradient(
            logits,
            found,
            grad * scale,
            shard,
            gradient,
            labels=labels,
            label_scale=1.0 if ce_scale is None else ce_scale,
            temperature=temperature,
            implementation=implementation,
        )
    output = replace(output, loss_sum=output.loss_sum.detach())
    return Evaluated(output, found.token_loss, found.top_column)

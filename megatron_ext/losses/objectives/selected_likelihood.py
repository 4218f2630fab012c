"""Objectives on a few tokens of each row and the rest, evaluated with the cross-entropy.

T rows, K tokens, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_ext.losses.base import DistillationInputs, LossOutput
from megatron_ext.losses.objective import Evaluated, Scale, label_scales
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.selected_tokens import (
    SelectedTokens,
    evaluate_selected_tokens,
    write_selected_gradient,
)

Compare = Callable[[torch.Tensor, SelectedTokens], LossOutput]
"""Function of log-probabilities [T, K + 1] with a graph, of the tokens and of the rest, and of what
was found of the rows."""


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
    labels, place, asked = inputs.labels.flatten(), None, token_id
    if ce_scale is not None:
        assert temperature == 1.0
        place = _place_of(labels, token_id)
        is_apart = (place == token_id.shape[1]) & (labels >= 0) & (labels < shard.vocab_size)
        asked = torch.cat([token_id, torch.where(is_apart, labels, -1)[:, None]], dim=1)
    found = evaluate_selected_tokens(
        logits,
        asked,
        shard,
        temperature=temperature,
        with_top_column=ce_scale is not None or with_top_column,
        implementation=implementation,
    )
    needs_gradient = gradient is not None
    log_prob = found.log_prob.requires_grad_(needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        read = log_prob if place is None else _with_label_in_the_rest(log_prob)
        output = compare(read, found)
    if gradient is not None:
        (grad,) = torch.autograd.grad(output.loss_sum, log_prob, materialize_grads=True)
        grad = grad * scale
        if place is not None and ce_scale is not None:
            weight = label_scales(inputs, ce_scale).to(grad.dtype)
            grad.scatter_add_(1, place[:, None], -weight[:, None])
        write_selected_gradient(
            logits,
            found,
            grad,
            shard,
            gradient,
            temperature=temperature,
            implementation=implementation,
        )
    output = replace(output, loss_sum=output.loss_sum.detach())
    if place is None:
        return Evaluated(output, None, found.top_column)
    loss = -log_prob.detach().gather(1, place[:, None])[:, 0]
    loss = loss.masked_fill(labels < 0, 0.0).masked_fill(labels >= shard.vocab_size, torch.nan)
    return Evaluated(output, loss, found.top_column)


def _place_of(labels: torch.Tensor, token_id: torch.Tensor) -> torch.Tensor:
    """Place int64 [T] of each label among the row's tokens, K where it is none of them."""
    hits = (token_id == labels[:, None]) & (labels[:, None] >= 0)
    places = torch.arange(token_id.shape[1], device=labels.device)
    return torch.where(hits, places, token_id.shape[1]).amin(dim=1)


def _with_label_in_the_rest(log_prob: torch.Tensor) -> torch.Tensor:
    """[T, K + 1] of [T, K + 2], whose last but one, the label that is apart, joins the rest."""
    label, rest = log_prob[:, -2], log_prob[:, -1]
    # Their sum would have no derivative.
    is_nothing = (label == -torch.inf) & (rest == -torch.inf)
    label, rest = label.masked_fill(is_nothing, 0.0), rest.masked_fill(is_nothing, 0.0)
    joined = torch.logaddexp(label, rest).masked_fill(is_nothing, -torch.inf)
    return torch.cat([log_prob[:, :-2], joined[:, None]], dim=1)

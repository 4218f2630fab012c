"""Evaluation of objectives that read the same logits, together and without a graph.

n rows, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_ext.losses.base import DistillationInputs, LossOutput
from megatron_ext.losses.objective import FusedObjective, Objective, Scale, is_zero
from megatron_ext.losses.objectives.next_token import NextTokenLoss


def weighted_sum(outputs: Mapping[str, LossOutput], scales: Mapping[str, Scale]) -> torch.Tensor:
    """``sum over outputs: scale * loss_sum``, with the graphs of these."""
    total: torch.Tensor | None = None
    for name, output in outputs.items():
        scale = scales[name]
        if total is None:
            total = output.loss_sum * scale
        elif isinstance(scale, torch.Tensor):
            total = total + output.loss_sum * scale
        else:
            total = torch.add(total, output.loss_sum, alpha=scale)
    assert total is not None
    return total


def evaluate_together(
    objectives: Mapping[str, Objective],
    scales: Mapping[str, Scale],
    inputs: DistillationInputs,
    *,
    gradient: torch.Tensor | None,
) -> dict[str, LossOutput]:
    """Outputs without a graph, by name, and the gradient of the scaled sums together.

    A ``FusedObjective``, with the cross-entropy or without, is one pass. Other objectives run under
    autograd: each has a tensor of the size of the logits, but for one alone that writes over them.
    What has the scale 0 is measured in a pass of its own.

    Args:
        inputs: With logits [B, T, Vp] that have no graph.
        gradient: [n, Vp], n = B T, receives the gradient; can be the logits. None: none is
            computed.

    Collectives: those of the objectives, forward and backward.
    """
    scaled = {name: each for name, each in objectives.items() if not is_zero(scales[name])}
    with torch.no_grad():
        # A term of weight 0 is measured all the same, before a gradient takes the logits' place.
        outputs = {name: each(inputs) for name, each in objectives.items() if name not in scaled}
    if scaled:
        outputs |= _evaluate_scaled(scaled, scales, inputs, gradient=gradient)
    elif gradient is not None:
        gradient.zero_()
    return {name: outputs[name] for name in objectives}


def _evaluate_scaled(
    objectives: Mapping[str, Objective],
    scales: Mapping[str, Scale],
    inputs: DistillationInputs,
    *,
    gradient: torch.Tensor | None,
) -> dict[str, LossOutput]:
    """``evaluate_together`` of objectives with a weight."""
    main, labelled = _in_one_pass(objectives, inputs)
    if main is None:
        return _under_autograd(objectives, scales, inputs, gradient)
    objective = objectives[main]
    assert isinstance(objective, FusedObjective)
    evaluated = objective.evaluate(
        inputs,
        scale=scales[main],
        ce_scale=None if labelled is None else scales[labelled],
        gradient=gradient,
    )
    outputs = {main: evaluated.output}
    if labelled is not None:
        next_token = objectives[labelled]
        assert isinstance(next_token, NextTokenLoss)
        assert evaluated.token_loss is not None
        assert evaluated.top_column is not None
        outputs[labelled] = next_token.output(inputs, evaluated.token_loss, evaluated.top_column)
    return outputs


def _in_one_pass(
    objectives: Mapping[str, Objective], inputs: DistillationInputs
) -> tuple[str | None, str | None]:
    """Names of the objective that one pass evaluates, and of the cross-entropy beside it."""
    labelled = [name for name, each in objectives.items() if isinstance(each, NextTokenLoss)]
    others = [name for name in objectives if name not in labelled]
    if len(labelled) > 1 or len(others) > 1:
        return None, None
    if not others:
        return labelled[0], None
    main = objectives[others[0]]
    if not isinstance(main, FusedObjective) or not main.fuses(inputs):
        return None, None
    if not labelled:
        return others[0], None
    return (others[0], labelled[0]) if main.takes_labels else (None, None)


def fuses(objective: Objective, inputs: DistillationInputs) -> bool:
    """Whether an objective evaluates the cross-entropy in its own pass over ``inputs``."""
    if not isinstance(objective, FusedObjective):
        return False
    return objective.takes_labels and objective.fuses(inputs)


def _under_autograd(
    objectives: Mapping[str, Objective],
    scales: Mapping[str, Scale],
    inputs: DistillationInputs,
    gradient: torch.Tensor | None,
) -> dict[str, LossOutput]:
    leaf = inputs.student_logits.detach().requires_grad_(gradient is not None)
    # A gradient alone can take the place of the logits.
    is_over = gradient is not None and gradient.data_ptr() == leaf.data_ptr()
    with torch.set_grad_enabled(gradient is not None):
        outputs = {
            name: objective(
                replace(
                    inputs,
                    student_logits=leaf,
                    grad_scale=scales[name],
                    in_place=is_over and len(objectives) == 1,
                )
            )
            for name, objective in objectives.items()
        }
    if gradient is not None:
        sums = [output.loss_sum for output in outputs.values()]
        weights = [torch.ones_like(out.loss_sum) * scales[name] for name, out in outputs.items()]
        (found,) = torch.autograd.grad(sums, leaf, weights, materialize_grads=True)
        if found.data_ptr() != gradient.data_ptr():
            gradient.copy_(found.flatten(0, 1))
    return {name: replace(out, loss_sum=out.loss_sum.detach()) for name, out in outputs.items()}

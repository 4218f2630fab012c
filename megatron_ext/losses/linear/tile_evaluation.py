"""The weighted sum of objectives on one tile, and its gradient over the logits.

n rows, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import vocab_argmax
from megatron_ext.losses.base import DistillationInputs, LossOutput, Objective
from megatron_ext.losses.linear.evaluations import EVALUATIONS, Scale, TileTask
from megatron_ext.losses.objectives.next_token import NextTokenLoss
from megatron_ext.losses.objectives.vocab_kl import VocabKLLoss


class Evaluated(NamedTuple):
    """All without a graph."""

    outputs: dict[str, LossOutput]

    gradient: torch.Tensor | None
    """[n, Vp] of the scaled sums together; None where it was not asked for."""


def evaluate_tile(
    objectives: Mapping[str, Objective],
    scales: Mapping[str, Scale],
    inputs: DistillationInputs,
    *,
    needs_gradient: bool,
) -> Evaluated:
    """Objectives on a tile's logits [1, n, Vp], which have no graph and can be overwritten.

    One objective of ``EVALUATIONS``, with the cross-entropy or without, writes its gradient over
    the logits. Others run under autograd: each takes one or two more tensors of their size.

    Collectives: those of the objectives, forward and backward, and two all-reduces of [n] for the
    accuracy where another objective reads the labels as well.
    """
    main, labelled = _in_one_sweep(objectives, inputs)
    if main is None:
        return _under_autograd(objectives, scales, inputs, needs_gradient)
    logits = inputs.student_logits.flatten(0, 1)
    # Read before the gradient is written over the logits.
    top_column = None if labelled is None else vocab_argmax(logits, inputs.student_shard)
    values = EVALUATIONS[type(objectives[main])](
        objectives[main],
        TileTask(
            inputs,
            scales[main],
            None if labelled is None else scales[labelled],
            logits if needs_gradient else None,
        ),
    )
    outputs = {main: values.output}
    if labelled is not None:
        next_token = objectives[labelled]
        assert isinstance(next_token, NextTokenLoss)
        assert values.token_loss is not None
        assert top_column is not None
        outputs[labelled] = next_token.output(inputs, values.token_loss, top_column)
    outputs = {name: outputs[name] for name in objectives}
    return Evaluated(outputs, logits if needs_gradient else None)


def _in_one_sweep(
    objectives: Mapping[str, Objective], inputs: DistillationInputs
) -> tuple[str | None, str | None]:
    """Names of the objective that has an evaluation, and of the cross-entropy beside it."""
    labelled = [name for name, each in objectives.items() if isinstance(each, NextTokenLoss)]
    others = [name for name in objectives if name not in labelled]
    if len(labelled) > 1 or len(others) > 1:
        return None, None
    if not others:
        return labelled[0], None
    main = others[0]
    if not has_evaluation(objectives[main], inputs):
        return None, None
    return main, labelled[0] if labelled else None


def has_evaluation(objective: Objective, inputs: DistillationInputs) -> bool:
    """Whether value and gradient of an objective come from one sweep, and a cross-entropy's too."""
    on_top_tokens = (
        isinstance(objective, VocabKLLoss)
        and inputs.teacher is not None
        and inputs.teacher.kind == "topk"
    )
    is_learned = inputs.projection is not None and inputs.projection.learned is not None
    is_nemo = getattr(objective, "numerics", "proper") == "nemo"
    return type(objective) in EVALUATIONS and not (on_top_tokens or is_learned or is_nemo)


def _under_autograd(
    objectives: Mapping[str, Objective],
    scales: Mapping[str, Scale],
    inputs: DistillationInputs,
    needs_gradient: bool,
) -> Evaluated:
    leaf = inputs.student_logits.detach().requires_grad_(needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        outputs = {
            name: objective(
                replace(inputs, student_logits=leaf, announced=_announced(scales[name]))
            )
            for name, objective in objectives.items()
        }
    gradient = None
    if needs_gradient:
        sums = [output.loss_sum for output in outputs.values()]
        weights = [_like(scales[name], output.loss_sum) for name, output in outputs.items()]
        (found,) = torch.autograd.grad(sums, leaf, weights, materialize_grads=True)
        gradient = found.flatten(0, 1)
    return Evaluated(
        {name: replace(out, loss_sum=out.loss_sum.detach()) for name, out in outputs.items()},
        gradient,
    )


def _announced(scale: Scale) -> Scale:
    """0 on the host is not announced: a term that weighs nothing is measured all the same."""
    return 1.0 if isinstance(scale, float | int) and scale == 0 else scale


def _like(scale: Scale, loss_sum: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(loss_sum) * scale

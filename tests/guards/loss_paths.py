"""The ways to a loss that the guards hold: the one place that calls them.

A change of how losses are called is a change of this file, and of nothing beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megatron_ext.losses import (
    DistillationInputs,
    LossOutput,
    LossPart,
    LossPlan,
    NextTokenLoss,
)
from megatron_ext.losses.linear import LinearDistillation, no_logits
from tests.losses.microbatch import known_ahead
from tests.losses.objective_cases import table_of

COUNTS = {"kd": 29, "ce": 41}
"""What a global batch of several microbatches could count."""

TILE_ROWS = 5


@dataclass(frozen=True, kw_only=True)
class PathLoss:
    """One microbatch's loss."""

    total: torch.Tensor
    """Scalar with a graph."""

    parts: Mapping[str, LossOutput]
    """``kd`` is the objective's, ``ce`` that of the cross-entropy."""


def alone(objective, inputs):
    """The objective called by itself: its sum."""
    output = objective(inputs)
    return PathLoss(total=output.loss_sum, parts={"kd": output})


def with_cross_entropy(objective, inputs, *, kd_weight=0.7, ce_weight=0.3, teacher_weight=1.0):
    """The loss of a run: both terms, weighted, over the counts of the global batch.

    The objective ``next_token`` has no other term, as in a run.

    Args:
        teacher_weight: A scalar tensor where it follows the text.
    """
    # Not a leaf: the gradient may be written over the logits.
    inputs = replace(inputs, student_logits=inputs.student_logits.clone())
    student = DistillationInputs(
        student_logits=inputs.student_logits,
        student_shard=inputs.student_shard,
        labels=inputs.labels,
    )
    parts = {"ce": LossPart(objective=NextTokenLoss(), inputs=student, term="ce", count_name="ce")}
    if not isinstance(objective, NextTokenLoss):
        parts["kd"] = LossPart(
            objective=objective, inputs=inputs, term="kd", count_name="kd", weight=teacher_weight
        )
    plan = LossPlan(parts=parts, term_weights={"kd": kd_weight, "ce": ce_weight})
    loss = plan.loss(COUNTS, in_place=True)
    return PathLoss(total=loss.total, parts=loss.outputs)


def linear(objective, inputs):
    """Both terms from the student's hidden states and head, without whole logits.

    Raises:
        LossError: The objective or its inputs have no linear form.
    """
    objectives = {"ce": NextTokenLoss()}
    if not isinstance(objective, NextTokenLoss):
        objectives = {"kd": objective, **objectives}
    form = LinearDistillation(objectives=objectives, tile_rows=TILE_ROWS)
    tiles = form.tiles(known_ahead(inputs), table_of(inputs))
    logits = no_logits(inputs.student_hidden, inputs.student_shard)
    weights = {"kd": 0.7, "ce": 0.3}
    scales = {name: weights[name] / COUNTS[name] for name in objectives}
    loss = form(replace(inputs, student_logits=logits), tiles, scales)
    return PathLoss(total=loss.total, parts=loss.parts)

"""Bytes that one rank sends in a step, by what they are for.

Collectives are taken to be rings: an all-reduce of ``m`` bytes over ``r`` ranks sends
``2 m (r - 1) / r`` from each, a reduce-scatter or an all-gather half of that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from megatron_ext.training.dry_run.model_shape import ModelShape
from megatron_ext.training.dry_run.plan import FP32, Plan

_STATISTICS: Final = 3
"""fp32 numbers that a row sums over ranks for a term: its peak, its sum, its label or chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """Of a rank of one pipeline stage."""

    data_parallel: int
    """Gradients over replicas and the ranks that share their rows, and with the distributed
    optimizer the weights back."""

    context_parallel: int
    """Keys and values of whole rows in every layer, and of the student's their gradients back. Rows
    of chunks that two ranks have a part of are not counted."""

    tensor_parallel: int
    """Layers of the student, there and back, and of the teachers."""

    pipeline: int
    """Hidden states to the next stage and their gradients to the one before."""

    tied_embedding: int
    """The embedding's gradient between the first and the last stage."""

    served_targets: int
    """What comes of teachers elsewhere to the first rank of the last stage, which gives it to those
    that share its rows; on the last stage."""

    loss: int
    """Statistics of rows, and what is summed of columns of several ranks; on the last stage."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(getattr(self, item.name) for item in fields(self))


def wire_bytes(plan: Plan, stage: int) -> WireBytes:
    """What a rank of ``stage`` sends."""
    return WireBytes(
        data_parallel=_data_parallel(plan, stage),
        context_parallel=_context_parallel(plan),
        tensor_parallel=_tensor_parallel(plan, stage),
        pipeline=_pipeline(plan, stage),
        tied_embedding=_tied_embedding(plan, stage),
        served_targets=_served_targets(plan) if plan.student.is_last(stage) else 0,
        loss=_loss(plan) if plan.student.is_last(stage) else 0,
    )


def all_reduced(message: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` sends in an all-reduce of ``message`` bytes."""
    return 2 * message * (ranks - 1) // ranks


def _data_parallel(plan: Plan, stage: int) -> int:
    parameters = plan.student.parameters(stage)
    if plan.config.parallel.use_distributed_optimizer:
        ranks = plan.gradient_ranks
        return parameters * (FP32 + plan.element) * (ranks - 1) // ranks
    return all_reduced(parameters * FP32, plan.gradient_ranks)


def _context_parallel(plan: Plan) -> int:
    """An all-gather a layer forward, a reduce-scatter backward: as an all-reduce together."""
    recomputes = plan.config.training.recompute_granularity == "selective"
    again = plan.student.layers if recomputes else plan.student.layers * plan.recomputed_share
    halves = round((2 * plan.student.layers + again) * _keys_and_values(plan, plan.student))
    for teacher in plan.own_teachers:
        halves += teacher.layers * _keys_and_values(plan, teacher)
    return plan.microbatches * halves * (plan.cp - 1) // plan.cp


def _keys_and_values(plan: Plan, shape: ModelShape) -> int:
    """Bytes of a microbatch's whole rows, of a rank's heads."""
    width = 2 * shape.query_groups * shape.head_width
    return plan.cp * plan.tokens(shape) * width * plan.element


def _tensor_parallel(plan: Plan, stage: int) -> int:
    """Two all-reduces a layer each way, one behind the embedding, one of the head's input.

    Sequence parallelism makes each of them a reduce-scatter and an all-gather: as many bytes.
    """
    recomputed = round(2 * plan.student.layers * plan.recomputed_share)
    student = 4 * plan.student.layers + recomputed + (stage == 0) + plan.student.is_last(stage)
    total = student * _hidden(plan, plan.student)
    for teacher in plan.own_teachers:
        total += (2 * teacher.layers + (stage == 0)) * _hidden(plan, teacher)
    return plan.microbatches * all_reduced(total, plan.student.tp)


def _hidden(plan: Plan, shape: ModelShape) -> int:
    """Of the whole width and length, whichever rank holds them between two layers."""
    return plan.tokens(shape) * shape.model.hidden_size * plan.element


def _pipeline(plan: Plan, stage: int) -> int:
    """Between chunks of an interleaved pipeline the last stage sends to the first, too."""
    forward = plan.chunks - plan.student.is_last(stage)
    backward = plan.chunks - (stage == 0)
    if plan.stages == 1:
        return 0
    total = (forward + backward) * plan.hidden_bytes(plan.student)
    total += forward * sum(plan.hidden_bytes(teacher) for teacher in plan.own_teachers)
    return plan.microbatches * total


def _tied_embedding(plan: Plan, stage: int) -> int:
    is_end = stage == 0 or plan.student.is_last(stage)
    if not (plan.student.is_tied and plan.stages > 1 and is_end):
        return 0
    return all_reduced(plan.student.head_rows * plan.student.model.hidden_size * FP32, 2)


def _served_targets(plan: Plan) -> int:
    teachers = plan.config.named_teachers
    return sum(
        plan.microbatches * plan.cp * plan.tokens(plan.teachers[name]) * form.bytes_per_token
        for name, form in plan.forms.items()
        if teachers[name].is_elsewhere
    )


def _loss(plan: Plan) -> int:
    """Rows of cross-entropy, rows of both models for each teacher, and columns of several ranks.

    As many chunks are taken as the student has tokens, the most there can be.
    """
    tokens = plan.tokens(plan.student)
    message = _STATISTICS * FP32 * tokens
    for name, teacher in plan.teachers.items():
        message += _STATISTICS * FP32 * (tokens + plan.tokens(teacher))
        if name in plan.pairs:
            # What both models say of such a column.
            message += 2 * FP32 * tokens * plan.pairs[name].crossing_columns
    return plan.microbatches * all_reduced(message, plan.student.tp)

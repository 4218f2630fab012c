"""Floating-point operations of a step on all ranks, by what they are for.

A product with ``w`` weights takes ``2 w`` operations for each token; attention ``4 T h`` in each
layer, every position being compared with every other; a backward pass twice its forward, and once
more where layers are recomputed. What a
loss does to a logit is counted in bytes instead, since it waits for memory and not for arithmetic:
each logit is read twice, and the gradient written once (``B2`` of docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.training.dry_run.model_shape import ModelShape
from megatron_ext.training.dry_run.plan import Plan

_THERE_AND_BACK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArithmetic:
    """Of one optimizer step."""

    student_layers: int
    student_head: int
    teacher_layers: int
    teacher_heads: int
    loss_bytes: int
    """Moved, not operations."""

    @property
    def operations(self) -> int:
        """All of them."""
        layers = self.student_layers + self.teacher_layers
        return layers + self.student_head + self.teacher_heads

    @property
    def plain_share(self) -> float:
        """Operations of the student alone, over all."""
        return (self.student_layers + self.student_head) / self.operations


def step_arithmetic(plan: Plan) -> StepArithmetic:
    """What a step computes, all microbatches and replicas together."""
    rows = plan.config.training.global_batch_size
    student = plan.student
    teachers = plan.teachers
    return StepArithmetic(
        student_layers=round((_THERE_AND_BACK + plan.recomputed_share) * rows * _layers(student)),
        student_head=_THERE_AND_BACK * rows * _head(student),
        # Those elsewhere are computed by others; a head is applied where its targets are read.
        teacher_layers=rows * sum(_layers(teacher) for teacher in plan.own_teachers),
        teacher_heads=rows * sum(_head(teachers[name]) for name in _with_heads(plan)),
        loss_bytes=rows * plan.element * _logits_moved(plan),
    )


def _with_heads(plan: Plan) -> list[str]:
    """Teachers whose hidden states the student's ranks turn into logits."""
    forms = plan.forms
    return [name for name in plan.teachers if name not in forms or forms[name].kind == "hidden"]


def _layers(shape: ModelShape) -> int:
    """Operations of the forward pass of one row."""
    length = shape.model.seq_length
    attention = 4 * length * shape.heads * shape.head_width
    return shape.model.num_layers * shape.tp * length * (2 * shape.layer_products + attention)


def _head(shape: ModelShape) -> int:
    return 2 * shape.model.seq_length * shape.model.hidden_size * shape.padded_vocab_size


def _logits_moved(plan: Plan) -> int:
    student = plan.student.model.seq_length * plan.student.padded_vocab_size
    moved = 3 * student
    for teacher in plan.teachers.values():
        moved += 3 * student + 2 * teacher.model.seq_length * teacher.padded_vocab_size
    return moved

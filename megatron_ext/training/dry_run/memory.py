"""Memory of one rank at the peak of a step, part by part, in bytes.

What an allocator rounds up, communication libraries' buffers and a framework's own are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from megatron_ext.training.dry_run.activations import kept_activations, layer_activations
from megatron_ext.training.dry_run.model_shape import ModelShape
from megatron_ext.training.dry_run.plan import FP32, Plan

SLICE_BYTES: Final = {"cpu": 4 << 20, "cuda": 128 << 20}
"""One fp32 temporary of a loss, see ``distributed.row_slices``."""

_SLICES: Final = 4
"""Temporaries of a slice that live at once."""

_INT32: Final = 4
_TOKEN_BYTES: Final = 3 * 8 + 3 * 8
"""Token, label and position; chunk id, chunk start and end; int64 each."""

_INPUT_BYTES: Final = 3 * 8
"""Token, label and position of a rank's part of a row, beside the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Of a rank of one pipeline stage."""

    student_weights: int

    gradients: int
    """In fp32."""

    optimizer_state: int
    """Two moments, and in bf16 fp32 weights; a rank's share with the distributed optimizer."""

    teacher_weights: int
    """Of those on the student's ranks, and on the last stage the heads of others."""

    teacher_targets: int
    """The teachers' last hidden states of a whole global batch, or what comes of one that is
    elsewhere or cached; on the last stage."""

    batch: int
    """Tokens, labels, positions, chunks and masks of a whole global batch."""

    activations: int
    """Of the student's microbatches in flight; or of a teacher's layer, where that is more."""

    loss: int
    """Logits or tiles of them, their gradients, temporaries, projections; on the last stage."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(getattr(self, item.name) for item in fields(self))


def rank_memory(plan: Plan, stage: int) -> RankMemory:
    """The memory of a rank of ``stage``."""
    parameters = plan.student.parameters(stage)
    is_last = plan.student.is_last(stage)
    teachers, own = list(plan.teachers.values()), plan.own_teachers
    return RankMemory(
        student_weights=parameters * plan.element,
        gradients=parameters * FP32,
        optimizer_state=_optimizer_state(plan, parameters),
        teacher_weights=(
            sum(teacher.parameters(stage) for teacher in own) + (_heads(plan) if is_last else 0)
        )
        * plan.element,
        teacher_targets=sum(_targets(plan, name) for name in plan.teachers) if is_last else 0,
        batch=sum(_batch(plan, shape) for shape in (plan.student, *teachers)),
        activations=max(
            kept_activations(plan, stage),
            *(layer_activations(plan, teacher) for teacher in own),
            0,
        ),
        loss=_loss(plan) if is_last else 0,
    )


def _optimizer_state(plan: Plan, parameters: int) -> int:
    # In fp32 the weights are their own main copy.
    state = parameters * FP32 * (2 if plan.element == FP32 else 3)
    return (
        -(-state // plan.gradient_ranks)
        if plan.config.parallel.use_distributed_optimizer
        else state
    )


def _targets(plan: Plan, name: str) -> int:
    """Of one teacher; ids and numbers of other forms are taken to be as wide as they are sent."""
    teacher, form = plan.teachers[name], plan.forms.get(name)
    width = teacher.model.hidden_size * plan.element
    if form is not None and form.kind != "hidden":
        width = form.bytes_per_token
    return plan.microbatches * plan.tokens(teacher) * width


def _heads(plan: Plan) -> int:
    """Numbers of the heads of teachers that are elsewhere and send hidden states."""
    return sum(
        plan.teachers[name].head_rows * plan.teachers[name].model.hidden_size
        for name, form in plan.forms.items()
        if form.kind == "hidden"
    )


def _batch(plan: Plan, shape: ModelShape) -> int:
    # A packed row's mask is [1, S, T] booleans.
    masked = plan.row_length(shape) if plan.config.data.packing else 0
    cut = _INPUT_BYTES if plan.cp > 1 else 0
    return plan.microbatches * plan.tokens(shape) * (plan.cp * _TOKEN_BYTES + cut + masked)


def _loss(plan: Plan) -> int:
    teachers = plan.teachers.values()
    tables = sum(pair.entries for pair in plan.pairs.values()) * 2 * (FP32 + _INT32)
    slices = _SLICES * SLICE_BYTES["cuda" if plan.has_flash else "cpu"]
    if plan.teachers and plan.config.loss.linear:
        return tables + slices + _tiles(plan)
    # The logits, and a gradient of each term of the loss; a copy of the logits of the chunks that a
    # context-parallel rank owns.
    terms = 1 + len(plan.teachers) * (2 if plan.cp > 1 else 1)
    student = (1 + terms) * plan.tokens(plan.student) * plan.student.head_rows
    # One teacher at a time turns its hidden states into logits.
    teacher = max((plan.tokens(shape) * shape.head_rows for shape in teachers), default=0)
    return tables + slices + (student + teacher) * plan.element


def _tiles(plan: Plan) -> int:
    """A tile's logits of both models and their gradient; gradients of hidden states and head."""
    rows = plan.config.loss.linear_tile_rows
    student = plan.student
    widest = max(teacher.head_rows for teacher in plan.teachers.values())
    tile = min(rows, plan.tokens(student)) * 2 * student.head_rows + rows * widest
    hidden = plan.tokens(student) * student.model.hidden_size
    head = student.head_rows * student.model.hidden_size
    return (tile + hidden) * plan.element + head * FP32

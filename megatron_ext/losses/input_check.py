"""Whether logits, labels, teacher and alignment fit one another; host-side shapes only.

B batch, Ts Tt tokens, Vp local columns.
"""

from __future__ import annotations

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.targets import TargetKind, TeacherTargets


def check_student(inputs: DistillationInputs) -> None:
    """Check the student's logits [B, Ts, Vp] against its labels and shard.

    Raises:
        LossError: They differ in shape.
    """
    logits = tuple(inputs.student_logits.shape)
    expected = (*inputs.labels.shape, inputs.student_shard.width)
    if len(logits) != 3 or logits != expected:
        raise LossError(
            "student logits do not fit labels [B, Ts] and vocabulary shard",
            got=logits,
            expected=expected,
        )


def check_alignment(
    inputs: DistillationInputs,
    *,
    objective: str,
    kinds: tuple[TargetKind, ...] = ("logits", "hidden"),
) -> tuple[AlignmentBatch, TeacherTargets]:
    """The alignment and the teacher, both present and of the logits' shapes.

    Args:
        inputs: What the objective was called with.
        objective: Its name, for errors.
        kinds: The forms of teacher targets that it accepts.

    Raises:
        LossError: One is missing, targets have another form, or chunk ids, a chunk mask or columns
            differ in shape from what they belong to.
    """
    teacher, alignment = inputs.teacher, inputs.alignment
    if teacher is None or alignment is None:
        raise LossError(
            f"the objective {objective} needs a teacher and an alignment",
            got=" and ".join(
                f"no {name}"
                for name, part in (("teacher", teacher), ("alignment", alignment))
                if part is None
            ),
        )
    if teacher.kind not in kinds:
        raise LossError(
            f"the objective {objective} cannot use these teacher targets",
            got=f"kind {teacher.kind!r}",
            expected=f"kind {' or '.join(map(repr, kinds))}",
        )
    for side, chunk_id, rows in (
        ("student", alignment.student_chunk_id, inputs.student_logits.shape[:2]),
        ("teacher", alignment.teacher_chunk_id, teacher.positions),
    ):
        if chunk_id.shape != rows:
            raise LossError(
                f"{side} chunk ids do not fit the {side}'s positions [B, T]",
                got=tuple(chunk_id.shape),
                expected=tuple(rows),
            )
    mask = inputs.chunk_mask
    if mask is not None and (mask.shape != (alignment.chunk_count,) or mask.dtype != torch.bool):
        raise LossError(
            "the chunk mask does not fit the alignment",
            got=f"{mask.dtype} {tuple(mask.shape)}",
            expected=f"torch.bool ({alignment.chunk_count},)",
        )
    check_teacher_columns(teacher)
    return alignment, teacher


def check_teacher_columns(teacher: TeacherTargets) -> None:
    """Check logits or head rows against the teacher's shard.

    Raises:
        LossError: They differ in width.
    """
    columns = {"logits": teacher.logits, "hidden": teacher.head_weight}.get(teacher.kind)
    if columns is None:
        return
    width = columns.shape[-1 if teacher.kind == "logits" else 0]
    if width != teacher.shard.width:
        raise LossError(
            "teacher targets do not fit the teacher's vocabulary shard",
            got=f"{width} columns",
            expected=f"{teacher.shard.width}",
        )

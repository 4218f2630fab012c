"""Whether logits, labels, teacher and alignment fit one another; host-side shapes only.

B batch, Ts Tt tokens, Vp local columns.
"""

from __future__ import annotations

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.targets import TeacherTargets


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
    inputs: DistillationInputs, *, objective: str
) -> tuple[AlignmentBatch, TeacherTargets]:
    """The alignment and the teacher, both present and of the logits' shapes.

    Raises:
        LossError: One is missing, or chunk ids differ in shape from the logits they belong to.
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
    positions = teacher.logits if teacher.kind == "logits" else teacher.hidden
    if positions is None:
        raise LossError(
            f"the objective {objective} cannot use these teacher targets",
            got=f"kind {teacher.kind!r} without its tensors",
            expected="logits or hidden states",
        )
    for side, chunk_id, rows in (
        ("student", alignment.student_chunk_id, inputs.student_logits.shape[:2]),
        ("teacher", alignment.teacher_chunk_id, positions.shape[:2]),
    ):
        if chunk_id.shape != rows:
            raise LossError(
                f"{side} chunk ids do not fit the {side}'s positions [B, T]",
                got=tuple(chunk_id.shape),
                expected=tuple(rows),
            )
    columns = teacher.logits if teacher.kind == "logits" else teacher.head_weight
    width = None if columns is None else columns.shape[-1 if teacher.kind == "logits" else 0]
    if width != teacher.shard.width:
        raise LossError(
            "teacher targets do not fit the teacher's vocabulary shard",
            got=f"{width} columns",
            expected=f"{teacher.shard.width}",
        )
    return alignment, teacher

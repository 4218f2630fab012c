"""A megatron-core teacher in the student's layout, on the student's ranks."""

from __future__ import annotations

from megatron_ext.training.first_weights import frozen_teacher
from megatron_ext.training.learning_step import TaughtBy, run_projection
from megatron_ext.training.live_teacher import live_megatron_teacher
from megatron_ext.training.run_teachers.teacher_parts import StudentParts, TeacherParts
from megatron_ext.training.vocabulary_layout import lay_out


def teacher_on_student_ranks(name: str, run: StudentParts) -> TeacherParts:
    """Build and load it, and permute the heads of both models where the run lays them out.

    Collectives: those that build and load a model, of ``run_projection`` and of ``lay_out``.
    """
    config, groups = run.config, run.groups
    chunks, shard = frozen_teacher(config, name, run.tokenizer(name), groups)
    # After the model, which may not load: a projection of the run's own is its first file.
    projection = run_projection(config, run.inputs, name, groups)
    laid_out = None
    if config.training.vocabulary_layout == "co_sharded":
        assert projection is not None, "checked with the objective"
        laid_out = lay_out(
            config,
            projection,
            student=run.chunks,
            teacher=chunks,
            shards=(run.shard, shard),
            groups=groups,
        )
    live = live_megatron_teacher(chunks, shard, groups, offload=run.teacher(name).offload)
    layout = laid_out and laid_out.layout
    return TeacherParts(
        TaughtBy(name, live.head, shard, projection, layout),
        teacher=live.teacher,
        laid_out=laid_out,
    )

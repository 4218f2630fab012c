"""A teacher that transformers runs, whole on each rank of the student's last stage."""

from __future__ import annotations

from megatron_ext.training.learning_step import TaughtBy, run_projection
from megatron_ext.training.live_teacher import check_gives_hidden, live_teacher
from megatron_ext.training.loss_check import teacher_objective
from megatron_ext.training.run_teachers.teacher_parts import StudentParts, TeacherParts


def teacher_from_huggingface(name: str, run: StudentParts) -> TeacherParts:
    """Load it.

    Collectives: those of ``live_teacher`` and ``run_projection``.

    Raises:
        ConfigError: The objective reads hidden states, of which this model's logits are no product.
    """
    config, groups = run.config, run.groups
    live = live_teacher(config, name, run.tokenizer(name), groups)
    if teacher_objective(config, name).needs.hidden:
        objective = config.loss.of_teacher(run.teacher(name)).objective
        where = f"{config.section_of(name)}.checkpoint"
        check_gives_hidden(live, groups, where=where, why=f"the objective {objective} reads")
    # After the model, which may not load: a projection of the run's own is its first file.
    projection = run_projection(config, run.inputs, name, groups)
    return TeacherParts(
        TaughtBy(name, live.head, live.shard, projection, None), teacher=live.teacher
    )

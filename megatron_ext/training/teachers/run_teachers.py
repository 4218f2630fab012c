"""Construction of all teachers of a run on this rank, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from megatron_ext.training.first_weights import frozen_teacher, teacher_vocab_shard
from megatron_ext.training.learning_step import run_projection
from megatron_ext.training.objective import teacher_objective
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.cached_teacher import open_cached_teacher
from megatron_ext.training.teachers.live_teacher import (
    LoadedTeacher,
    StudentParts,
    check_gives_hidden,
    live_megatron_teacher,
    live_teacher,
)
from megatron_ext.training.teachers.remote import teacher_from_remote
from megatron_ext.training.vocabulary_layout import lay_out


def teacher_from_cache(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Open the cache of a teacher.

    Collectives: those of ``teacher_vocab_shard``, ``open_cached_teacher`` and ``run_projection``.
    """
    shard = teacher_vocab_shard(teacher, run.tokenizer(teacher), run.groups)
    cached = open_cached_teacher(teacher, shard=shard, groups=run.groups)
    projection = run_projection(teacher, run)
    return LoadedTeacher(teacher, shard, projection, cached=cached)


def teacher_from_huggingface(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Load a model that transformers runs.

    Collectives: those of ``live_teacher`` and ``run_projection``.

    Raises:
        ConfigError: The objective reads hidden states, and the model's logits are not their product
            with the head.
    """
    live = live_teacher(teacher, run.tokenizer(teacher), run.groups)
    if teacher_objective(teacher).needs.hidden:
        where = f"{teacher.section}.checkpoint"
        why = f"the objective {teacher.loss.objective} reads"
        check_gives_hidden(live, run.groups, where=where, why=why)
    # After the model, which may fail to load: a built projection is the run's first file.
    projection = run_projection(teacher, run)
    return LoadedTeacher(teacher, live.shard, projection, live.head, live.teacher)


def teacher_on_student_ranks(teacher: TeacherPlan, run: StudentParts) -> LoadedTeacher:
    """Build and load a model of megatron-core; permute both heads where the run asks for that.

    Collectives: those that build and load a model, of ``run_projection`` and of ``lay_out``.
    """
    chunks, shard = frozen_teacher(teacher, run.tokenizer(teacher), run.groups)
    # After the model, which may fail to load: a built projection is the run's first file.
    projection = run_projection(teacher, run)
    laid_out = None
    if run.plan.training.vocabulary_layout == "co_sharded":
        assert projection is not None, "checked with the objective"
        laid_out = lay_out(run, projection, teacher.config.model, chunks, shard)
    live = live_megatron_teacher(chunks, shard, run.groups, offload=teacher.config.offload)
    return LoadedTeacher(teacher, shard, projection, live.head, live.teacher, laid_out=laid_out)


_MAKERS: Final[Mapping[str, Callable[[TeacherPlan, StudentParts], LoadedTeacher]]] = {
    "cache": teacher_from_cache,
    "remote": teacher_from_remote,
    "huggingface": teacher_from_huggingface,
    "megatron": teacher_on_student_ranks,
}
"""By kind: ``cache`` where targets are read from files, ``remote`` where other processes send them,
otherwise the library that runs the model on the student's ranks."""


def make_run_teachers(run: StudentParts) -> dict[str, LoadedTeacher]:
    """Make every teacher of a run, one after the other, in the order of the configuration.

    Collectives: those of each kind.
    """
    return {
        name: _MAKERS[_kind(teacher)](teacher, run) for name, teacher in run.plan.teachers.items()
    }


def _kind(teacher: TeacherPlan) -> str:
    if teacher.config.cache is not None:
        return "cache"
    return "remote" if teacher.config.is_remote else teacher.config.library

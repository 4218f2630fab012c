"""Construction of all teachers of a run on this rank, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from megatron_ext.teachers import Teacher
from megatron_ext.training.config import TeacherConfig
from megatron_ext.training.first_weights import frozen_teacher, teacher_vocab_shard
from megatron_ext.training.learning_step import LoadedTeacher, run_projection
from megatron_ext.training.objective import teacher_objective
from megatron_ext.training.teachers.cached_teacher import CachedTeacher, open_cached_teacher
from megatron_ext.training.teachers.live_teacher import (
    check_gives_hidden,
    live_megatron_teacher,
    live_teacher,
)
from megatron_ext.training.teachers.remote import teacher_from_remote
from megatron_ext.training.teachers.teacher_parts import StudentParts, TeacherParts
from megatron_ext.training.vocabulary_layout import RunLayout, lay_out


def teacher_from_cache(name: str, run: StudentParts) -> TeacherParts:
    """Open the cache of a teacher.

    Collectives: those of ``teacher_vocab_shard``, ``open_cached_teacher`` and ``run_projection``.
    """
    teacher = run.teacher(name)
    shard = teacher_vocab_shard(teacher, run.tokenizer(name), run.groups)
    cached = open_cached_teacher(teacher, shard=shard, groups=run.groups)
    projection = run_projection(teacher, run.inputs, run.plan.run_dir, run.groups)
    return TeacherParts(LoadedTeacher(teacher, None, shard, projection, None), cached=cached)


def teacher_from_huggingface(name: str, run: StudentParts) -> TeacherParts:
    """Load a model that transformers runs.

    Collectives: those of ``live_teacher`` and ``run_projection``.

    Raises:
        ConfigError: The objective reads hidden states, and the model's logits are not their product
            with the head.
    """
    teacher, groups = run.teacher(name), run.groups
    live = live_teacher(teacher, run.tokenizer(name), groups)
    if teacher_objective(teacher).needs.hidden:
        where = f"{teacher.section}.checkpoint"
        why = f"the objective {teacher.loss.objective} reads"
        check_gives_hidden(live, groups, where=where, why=why)
    # After the model, which may fail to load: a built projection is the run's first file.
    projection = run_projection(teacher, run.inputs, run.plan.run_dir, groups)
    return TeacherParts(
        LoadedTeacher(teacher, live.head, live.shard, projection, None), teacher=live.teacher
    )


def teacher_on_student_ranks(name: str, run: StudentParts) -> TeacherParts:
    """Build and load a model of megatron-core; permute both heads where the run asks for that.

    Collectives: those that build and load a model, of ``run_projection`` and of ``lay_out``.
    """
    plan, teacher, groups = run.plan, run.teacher(name), run.groups
    chunks, shard = frozen_teacher(teacher, run.tokenizer(name), groups)
    # After the model, which may fail to load: a built projection is the run's first file.
    projection = run_projection(teacher, run.inputs, plan.run_dir, groups)
    laid_out = None
    if plan.training.vocabulary_layout == "co_sharded":
        assert projection is not None, "checked with the objective"
        laid_out = lay_out(
            plan.run_dir,
            projection,
            student=run.chunks,
            teacher=chunks,
            shards=(run.shard, shard),
            models=(plan.student, teacher.config.model),
            groups=groups,
        )
    live = live_megatron_teacher(chunks, shard, groups, offload=teacher.config.offload)
    layout = laid_out and laid_out.layout
    return TeacherParts(
        LoadedTeacher(teacher, live.head, shard, projection, layout),
        teacher=live.teacher,
        laid_out=laid_out,
    )


_MAKERS: Final[Mapping[str, Callable[[str, StudentParts], TeacherParts]]] = {
    "cache": teacher_from_cache,
    "remote": teacher_from_remote,
    "huggingface": teacher_from_huggingface,
    "megatron": teacher_on_student_ranks,
}
"""By kind: ``cache`` where targets are read from files, ``remote`` where other processes send them,
otherwise the library that runs the model on the student's ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTeachers:
    """The teachers of a run on this rank, in the order of the configuration."""

    teachers: Mapping[str, Teacher]
    """By name, those that predict microbatches."""

    cached: Mapping[str, CachedTeacher]
    """By name, those whose targets are read from a cache."""

    loaded: list[LoadedTeacher]
    """All of them, as the objectives read them."""

    laid_out: RunLayout | None
    """Order of the heads of student and teacher, in a run with a vocabulary layout."""


def make_run_teachers(run: StudentParts) -> RunTeachers:
    """Make every teacher of a run, one after the other; none where it does not distil.

    Collectives: those of each kind.
    """
    parts = {
        name: _MAKERS[kind_of(teacher.config)](name, run)
        for name, teacher in run.plan.teachers.items()
    }
    layouts = [made.laid_out for made in parts.values() if made.laid_out is not None]
    return RunTeachers(
        teachers={name: made.teacher for name, made in parts.items() if made.teacher is not None},
        cached={name: made.cached for name, made in parts.items() if made.cached is not None},
        loaded=[made.loaded for made in parts.values()],
        laid_out=layouts[0] if layouts else None,
    )


def kind_of(teacher: TeacherConfig) -> str:
    """The kind of a teacher, a key of the table of makers."""
    if teacher.cache is not None:
        return "cache"
    return "remote" if teacher.is_remote else teacher.library

"""All teachers of a run on this rank, each made as its kind is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from megatron_ext.teachers import Teacher
from megatron_ext.training.config import TeacherConfig
from megatron_ext.training.learning_step import TaughtBy
from megatron_ext.training.run_teachers.elsewhere import teacher_elsewhere
from megatron_ext.training.run_teachers.from_cache import teacher_from_cache
from megatron_ext.training.run_teachers.from_huggingface import teacher_from_huggingface
from megatron_ext.training.run_teachers.on_student_ranks import teacher_on_student_ranks
from megatron_ext.training.run_teachers.teacher_parts import StudentParts, TeacherParts
from megatron_ext.training.teacher_cache.cached_teacher import CachedTeacher
from megatron_ext.training.vocabulary_layout import RunLayout

_MAKERS: Final[Mapping[str, Callable[[str, StudentParts], TeacherParts]]] = {
    "cache": teacher_from_cache,
    "elsewhere": teacher_elsewhere,
    "huggingface": teacher_from_huggingface,
    "megatron": teacher_on_student_ranks,
}
"""By kind: ``cache`` where targets are read from files, ``elsewhere`` where other processes send
them, otherwise the library that runs it on the student's ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTeachers:
    """By name, and in the order of the configuration."""

    teachers: Mapping[str, Teacher]
    """Those that predict microbatches."""

    cached: Mapping[str, CachedTeacher]
    """Those whose targets are recorded."""

    taught_by: list[TaughtBy]

    laid_out: RunLayout | None
    """The order of the heads, which is one of a pair."""


def make_run_teachers(run: StudentParts) -> RunTeachers:
    """Make every teacher of a run, one after the other; none where it does not distil.

    Collectives: those of each kind.
    """
    names = run.config.named_teachers if run.config.distils else {}
    parts = {name: _MAKERS[kind_of(teacher)](name, run) for name, teacher in names.items()}
    layouts = [its.laid_out for its in parts.values() if its.laid_out is not None]
    return RunTeachers(
        teachers={n: its.teacher for n, its in parts.items() if its.teacher is not None},
        cached={n: its.cached for n, its in parts.items() if its.cached is not None},
        taught_by=[its.taught_by for its in parts.values()],
        laid_out=layouts[0] if layouts else None,
    )


def kind_of(teacher: TeacherConfig) -> str:
    """A key of the table of kinds."""
    if teacher.cache is not None:
        return "cache"
    return "elsewhere" if teacher.is_elsewhere else teacher.library

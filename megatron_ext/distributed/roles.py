"""Which processes of a launch are the student's, and which a teacher's own.

The first are the student's; the teachers' follow in the order of the configuration. A process takes
its role once, before it joins the others of the role, which are a world of their own from then on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Role:
    """What one process of a launch is."""

    teacher: str | None
    """Whose own ranks these are; None: the student's."""

    first: int
    """Rank in the launch of the role's first process."""

    size: int
    """Processes of the role."""

    launched: int
    """Processes of the launch."""

    rank: int
    """Of this process in its role."""

    @property
    def launch_rank(self) -> int:
        """Of this process in the launch."""
        return self.first + self.rank

    @property
    def prefix(self) -> str:
        """Under which the role's processes meet in the launch's store."""
        return "megatron_ext/student" if self.teacher is None else f"megatron_ext/{self.teacher}"


_role: Role | None = None


def role_of(rank: int, launched: int, teacher_ranks: Mapping[str, int]) -> Role:
    """The role of one rank.

    Args:
        rank: In the launch.
        launched: Processes of the launch.
        teacher_ranks: How many are each teacher's own, by name.

    Raises:
        ConfigError: None is left for the student.
    """
    student = student_processes(launched, teacher_ranks)
    if rank < student:
        return Role(None, 0, student, launched, rank)
    first = student
    for teacher, size in teacher_ranks.items():
        if rank < first + size:
            return Role(teacher, first, size, launched, rank - first)
        first += size
    raise AssertionError(f"rank {rank} of {launched}")


def student_processes(launched: int, teacher_ranks: Mapping[str, int]) -> int:
    """Processes that a launch leaves the student.

    Raises:
        ConfigError: None.
    """
    student = launched - sum(teacher_ranks.values())
    if student < 1:
        of_teachers = ", ".join(f"{count} of {name}" for name, count in teacher_ranks.items())
        raise ConfigError(
            "the teachers' own ranks leave none for the student",
            got=f"{launched} process{'es' if launched > 1 else ''}, {of_teachers}",
            fix="start more processes with torchrun --nproc-per-node, or lower serving.ranks",
        )
    return student


def take(teacher_ranks: Mapping[str, int]) -> Role | None:
    """Take the role that torchrun's rank gives this process; None where all have the same.

    Raises:
        ConfigError: No process is left for the student.
    """
    global _role
    _role = None
    if teacher_ranks:
        environment = os.environ
        rank, launched = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        _role = role_of(rank, launched, teacher_ranks)
    return _role


def current() -> Role | None:
    """That was taken."""
    return _role

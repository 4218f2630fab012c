"""How many processes a parallel layout needs; plain numbers, so that it is checked first.

Which processes of a launch are the student's, and which a teacher's own.

The first are the student's; the teachers' follow in the order of the configuration. A process takes
its role once, before it joins the others of the role, which are a world of their own from then on.
"""

from __future__ import annotations

import math
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


def launched_processes() -> int:
    """Number of processes that torchrun started, of this one's role; one without it."""
    role = current()
    return role.size if role is not None else int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How processes share one model; what is left over is data parallelism."""

    tensor_model_parallel_size: int = 1

    pipeline_model_parallel_size: int = 1

    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks of a pipeline rank, which megatron-core's schedules interleave above 1."""

    context_parallel_size: int = 1

    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share every sequence between the layers' matrices."""

    def replicas(self, world_size: int) -> int:
        """Number of whole model replicas that the processes make.

        Raises:
            ConfigError: The processes do not divide into whole replicas.
        """
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        cp = self.context_parallel_size
        if world_size % (tp * cp * pp):
            raise ConfigError(
                "the processes do not divide into whole model replicas",
                got=f"{world_size} process{'es' if world_size > 1 else ''}",
                expected=(
                    f"a multiple of {tp * cp * pp} (tensor_model_parallel_size {tp}"
                    + f" x context_parallel_size {cp}" * (cp > 1)
                    + f" x pipeline_model_parallel_size {pp})"
                ),
                fix="start so many with torchrun --nproc-per-node, or change the sizes",
            )
        return world_size // (tp * cp * pp)

    @property
    def sequence_multiple(self) -> int:
        """What rows are filled up to a multiple of, so that every rank has an equal part of them.

        A context-parallel rank has two slices of a row, which sequence parallelism cuts together.
        Without context parallelism 1: rows are left as they are.
        """
        if self.context_parallel_size == 1:
            return 1
        parts = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return self.context_parallel_size * math.lcm(2, parts)

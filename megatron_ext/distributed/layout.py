"""Parallel layout of a model, and the roles of a launch's processes: student or teacher.

The student's processes come first; those of the teachers with ranks of their own follow in the
order of the configuration. A process takes its role once, before it joins the others of the role,
which form a world of their own from then on. Plain numbers: checked before torch is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Role:
    """Role of one process of a launch."""

    teacher: str | None
    """Name of the teacher that the process serves; None: the student."""

    first: int
    """Rank in the launch of the role's first process."""

    size: int
    """Processes of the role."""

    launched: int
    """Processes of the launch."""

    rank: int
    """Rank of this process in its role."""

    @property
    def launch_rank(self) -> int:
        """Rank of this process in the launch."""
        return self.first + self.rank

    @property
    def prefix(self) -> str:
        """Key prefix of the role's processes in the launch's store."""
        return "megatron_ext/student" if self.teacher is None else f"megatron_ext/{self.teacher}"


_role: Role | None = None


def role_of(rank: int, launched: int, teacher_ranks: Mapping[str, int]) -> Role:
    """The role of one rank.

    Args:
        rank: Rank in the launch.
        launched: Processes of the launch.
        teacher_ranks: Number of ranks of each teacher, by name.

    Raises:
        ConfigError: No process is left for the student.
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
        ConfigError: No process is left.
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
    """Take the role that torchrun's rank gives this process; None without teacher ranks.

    Raises:
        ConfigError: No process is left for the student.
    """
    global _role
    _role = None
    if teacher_ranks:
        rank = int(os.environ.get("RANK", "0"))
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        _role = role_of(rank, launched, teacher_ranks)
    return _role


def current() -> Role | None:
    """Role that ``take`` gave this process."""
    return _role


def launched_processes() -> int:
    """Number of processes of this one's role; without roles, torchrun's or 1."""
    role = current()
    return role.size if role is not None else int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes of one model; the remaining factor of the processes is data parallelism."""

    tensor_model_parallel_size: int = 1

    pipeline_model_parallel_size: int = 1

    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks of a pipeline rank, which megatron-core's schedules interleave above 1."""

    context_parallel_size: int = 1

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer, of all tensor-, context- and data-parallel ranks of
    a stage."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that share an expert; None for ``tensor_model_parallel_size``."""

    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share every sequence between the layers' matrices."""

    def replicas(self, world_size: int) -> int:
        """Number of model replicas that the processes form.

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
                fix=(
                    "start so many with torchrun --nproc-per-node, in a dry run pass --world-size, "
                    "or change the sizes"
                ),
            )
        self._check_experts(world_size // pp)
        return world_size // (tp * cp * pp)

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share an expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def shares_experts_over_replicas(self) -> bool:
        """Whether some of the ranks that share experts are of different replicas."""
        of_replica = self.tensor_model_parallel_size * self.context_parallel_size
        return bool(of_replica % (self.expert_model_parallel_size * self.expert_tensor_ranks))

    @property
    def shown_experts(self) -> str:
        """Sizes of the groups that share experts, for errors."""
        return (
            f"expert_model_parallel_size {self.expert_model_parallel_size} x "
            f"expert_tensor_parallel_size {self.expert_tensor_ranks}"
        )

    def _check_experts(self, stage_size: int) -> None:
        ep, etp = self.expert_model_parallel_size, self.expert_tensor_ranks
        if stage_size % (ep * etp):
            raise ConfigError(
                "the processes of a stage do not divide over experts",
                got=f"{stage_size} process{'es' if stage_size > 1 else ''}",
                expected=f"a multiple of {ep * etp} ({self.shown_experts})",
                fix="start more with torchrun --nproc-per-node, or change the sizes",
            )

    @property
    def sequence_multiple(self) -> int:
        """Multiple that rows are padded to, so that every rank has an equal part of each row.

        A context-parallel rank has two slices of a row, which sequence parallelism cuts together.
        1 without context parallelism: rows are not padded.
        """
        if self.context_parallel_size == 1:
            return 1
        parts = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return self.context_parallel_size * math.lcm(2, parts)

"""Bytes that a loss must move, and those that each implementation does, from shapes alone.

b bytes of a logit; Ts Tt rows and vs vt columns of this rank; C chunks. The floors are those of
logits in memory that the gradient may overwrite or not: every logit read once (``B1``: a row stays
in a cache between its statistics and its gradient) or twice (``B2``: it does not, as where a
collective sits between), and the student's gradient written once:

    B1 = b (2 Ts vs + Tt vt)        B2 = b (3 Ts vs + 2 Tt vt)

Kernels are counted by the table ``KERNELS``: how often each sweeps over the logits, and what it
writes and reads besides. Torch operators are counted by ``traffic.Traffic``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from .microbatch import Shape

Teacher = Literal["logits", "statistics", "none"]
"""What a loss must know of the teacher: every logit twice (sum and gradient), the sums alone, or
nothing."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Sweeps of an objective's kernels over whole matrices of logits."""

    student_reads: int = 2
    student_writes: int = 1
    teacher_reads: int = 2
    teacher: Teacher = "logits"
    besides: Callable[[Shape, int], float] = lambda shape, size: 0.0
    """Bytes of anything else, from the shape and the bytes of a logit."""


def _vectors(shape: Shape, size: int) -> float:
    """Peaks, sums, largest columns and losses: 40 B a row, written and read."""
    return 80.0 * (shape.student_rows + shape.teacher_rows)


def _projection(shape: Shape, size: int) -> float:
    """Columns that are sums: the logits of their entries again, and two fp32 numbers a column.

    Each entry's logit is read for the sum and the slope for the gradient; a column has the sum, the
    teacher's mean and the slope, each written and read.
    """
    entries = shape.entries - shape.direct_pairs
    of_a_chunk = entries * (size + 4) + shape.summed_columns * (size + 3 * 8)
    return _vectors(shape, size) + shape.chunks * of_a_chunk + 8.0 * shape.entries


KERNELS: Final = {
    "projected_kl": Kernels(besides=_projection),
    "projected_kl + next_token": Kernels(besides=_projection),
    "partition_kl": Kernels(besides=_vectors),
    "vocab_kl": Kernels(besides=_vectors),
    "alm": Kernels(teacher_reads=1, teacher="statistics", besides=_vectors),
    "next_token": Kernels(teacher_reads=0, teacher="none", besides=_vectors),
}
"""Objectives whose kernels are counted; the others run kernels among torch operators."""


def logits_bytes(shape: Shape, size: int) -> tuple[int, int]:
    """Bytes of the student's logits and of the teacher's."""
    return (
        size * shape.student_rows * shape.student_columns,
        size * shape.teacher_rows * shape.teacher_columns,
    )


def floors(shape: Shape, size: int, teacher: Teacher) -> tuple[int, int]:
    """``B1`` and ``B2``."""
    student, others = logits_bytes(shape, size)
    once = 0 if teacher == "none" else others
    twice = {"logits": 2 * others, "statistics": others, "none": 0}[teacher]
    return 2 * student + once, 3 * student + twice


def kernel_bytes(objective: str, shape: Shape, size: int) -> float | None:
    """Bytes that the kernels of an objective move; None where they are not in the table."""
    passes = KERNELS.get(objective)
    if passes is None:
        return None
    student, others = logits_bytes(shape, size)
    sweeps = (passes.student_reads + passes.student_writes) * student
    return sweeps + passes.teacher_reads * others + passes.besides(shape, size)

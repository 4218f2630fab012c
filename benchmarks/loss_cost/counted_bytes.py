"""Bytes that a loss must move, and those that its kernels do, from shapes alone.

b bytes of a logit; Ts Tt rows and vs vt columns of this rank; C chunks. The floors are those of
logits in memory: every logit read once (``B1``: a row stays in a cache between its statistics and
its gradient) or twice (``B2``: it does not, as where a collective sits between), and the student's
gradient written once:

    B1 = b (2 Ts vs + Tt vt)        B2 = b (3 Ts vs + 2 Tt vt)

Kernels are counted launch by launch: ``LAUNCHES`` has what each reads and writes, every element
once for each launch. Tables that all rows share count once, since they stay in a cache. Picking
single columns out of a row fetches whole sectors of 32 bytes, of which the count sees the columns
alone. Torch operators are counted by ``traffic.Traffic``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from .microbatch import Shape

Teacher = Literal["logits", "statistics", "none"]
"""What a loss must know of the teacher: every logit twice (sum and gradient), the sums alone, or
nothing."""

Launches = list[tuple[str, float]]
"""What is done, and the bytes it moves."""

_ROW: Final = 40
"""Bytes of a row's peaks, sums and largest column, written and read again."""


def _statistics(shape: Shape, size: int, *, teacher: bool = True) -> Launches:
    student, others = logits_bytes(shape, size)
    launches = [("student: sums of rows", student + 2.0 * _ROW * shape.student_rows)]
    if teacher:
        launches.append(("teacher: sums of rows", others + 2.0 * _ROW * shape.teacher_rows))
    return launches


def _projected_kl(shape: Shape, size: int) -> Launches:
    """``ops/projected_kl``, forward KL: D summed columns, R residual rows, fp32 scratch."""
    student, _ = logits_bytes(shape, size)
    slots, rows, direct = shape.summed_columns, shape.residual_rows, shape.direct_pairs
    joined = shape.joined_rows * (2 * student / shape.student_rows + size * direct)
    residual = 1.0 * size * shape.student_rows * rows
    return [
        *_statistics(shape, size),
        ("direct pairs: student read, gradient written", 2.0 * (student - residual)),
        ("direct pairs: teacher", 1.0 * size * shape.teacher_rows * direct),
        ("tokens of several columns: means", shape.chunks * (size + 4.0) * rows),
        ("columns of several tokens: sums", shape.chunks * 4.0 * (rows + slots)),
        ("columns of several tokens: slopes", shape.chunks * (size + 8.0) * slots),
        ("tokens of several columns: sums, gradient", 2 * residual + shape.chunks * 4.0 * slots),
        ("second sweep over chunks of several student tokens", joined),
        ("tables of the projection", 4.0 * shape.student_columns + 12.0 * shape.entries),
    ]


def _partition_kl(shape: Shape, size: int) -> Launches:
    student, _ = logits_bytes(shape, size)
    return [
        *_statistics(shape, size),
        ("sweep: student read, gradient written", 2.0 * student),
        ("sweep: teacher at shared tokens", 1.0 * size * shape.teacher_rows * shape.common),
        ("table of pairs", 4.0 * shape.student_columns),
    ]


def _vocab_kl(shape: Shape, size: int) -> Launches:
    student, others = logits_bytes(shape, size)
    return [
        *_statistics(shape, size),
        ("sweep: student read, gradient written", 2.0 * student),
        ("sweep: teacher", 1.0 * others),
    ]


def _alm(shape: Shape, size: int) -> Launches:
    student, _ = logits_bytes(shape, size)
    sweep = ("sweep: student read, gradient written", 2.0 * student)
    return [*_statistics(shape, size), sweep]


def _next_token(shape: Shape, size: int) -> Launches:
    student, _ = logits_bytes(shape, size)
    sweep = ("sweep: student read, gradient written", 2.0 * student)
    return [*_statistics(shape, size, teacher=False), sweep]


def _selection(shape: Shape, size: int, *, behind: int = 0) -> Launches:
    """The largest probabilities by two passes that count and one that writes, of both models.

    Of the columns from ``behind`` on.
    """
    student = size * shape.student_rows * (shape.student_columns - behind)
    others = size * shape.teacher_rows * (shape.teacher_columns - behind)
    return [
        ("student: selection in three passes", 3.0 * student),
        ("teacher: selection in three passes", 3.0 * others),
    ]


def _uld(shape: Shape, size: int) -> Launches:
    student, _ = logits_bytes(shape, size)
    sweep = ("sweep: student read, gradient written", 2.0 * student)
    return [*_statistics(shape, size), *_selection(shape, size), sweep]


def _gold(shape: Shape, size: int) -> Launches:
    """``ops/matched_divergence``: two sweeps over shared tokens, and the selection of the rest.

    Shared tokens lie side by side, before all others.
    """
    student, _ = logits_bytes(shape, size)
    shared = 2.0 * size * shape.teacher_rows * shape.common
    own_shared = 1.0 * size * shape.student_rows * shape.common
    return [
        *_statistics(shape, size),
        *_selection(shape, size, behind=shape.common),
        ("first sweep: student at shared tokens", own_shared),
        ("second sweep: student read, gradient written", 2.0 * student),
        ("both sweeps: teacher at shared tokens", shared),
    ]


def _strict_topk(shape: Shape, size: int) -> Launches:
    """``ops/selected_tokens``: the teacher's top tokens, and both models' logits beside the rest's.

    Selected columns are a bit of each, set to 0 and read.
    """
    student, others = logits_bytes(shape, size)
    return [
        *_statistics(shape, size),
        ("teacher: selection by logit, in four passes", 4.0 * others),
        ("bits of selected columns", (student + others) / (4.0 * size)),
        ("student read, gradient written", 2.0 * student),
    ]


LAUNCHES: Final[dict[str, Callable[[Shape, int], Launches]]] = {
    "projected_kl": _projected_kl,
    "projected_kl + next_token": _projected_kl,
    "partition_kl": _partition_kl,
    "vocab_kl": _vocab_kl,
    "hybrid_kl": _gold,
    "hybrid_kl + next_token": _gold,
    "gold": _gold,
    "uld": _uld,
    "uld + next_token": _uld,
    "strict_topk": _strict_topk,
    "strict_topk + next_token": _strict_topk,
    "alm": _alm,
    "alm + next_token": _alm,
    "next_token": _next_token,
}
"""Objectives whose kernels are counted. Cross-entropy is fused: it adds no sweep."""


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
    """Bytes that the kernels of an objective move; None where they are not counted."""
    launches = LAUNCHES.get(objective)
    return None if launches is None else sum(moved for _, moved in launches(shape, size))

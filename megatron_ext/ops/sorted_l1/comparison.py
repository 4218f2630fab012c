"""Comparison of both sides' largest probabilities in sorted order, over vocabulary shards.

C chunks, K candidates. Equations are in the README.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.distributed.shard_collectives import gather_columns, group_size
from megatron_ext.ops.sort_keys import largest_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ROUNDING: Final = 8
"""Units in the last place within which two probabilities count as equal."""

_PLACES: Final = 1024
"""Places that a program of the kernel compares at once."""

LONGEST_RUN: Final = 4096
"""Candidates that torch sorts within one block of a GPU, three times as fast as longer rows."""


class Largest(NamedTuple):
    """Candidates of this rank for the largest places, at least as many as are compared."""

    values: torch.Tensor
    """[C, K] in any order that keeps equal values in the order of columns; -1: no candidate."""

    columns: torch.Tensor
    """[C, K], any integer type; arbitrary where there is no candidate."""

    rest: torch.Tensor
    """[C, 1] this rank's mass outside the candidates; exactly 0 where there is nothing outside."""

    is_descending: bool = False
    """Whether ``values`` are in descending order."""


class Candidates(NamedTuple):
    """Columns of one side among which the largest are looked for."""

    kept: int
    """K, how many of them."""

    excluded: torch.Tensor | None
    """bool [Vp]: columns that come last, with the value -1; None: no column does."""

    lists: tuple[NDArray[np.int32], NDArray[np.int32]] | None
    """The other columns and these, for compiled loops; empty where none is excluded. None: torch
    looks for the largest."""

    @classmethod
    def of(
        cls,
        places: int | None,
        width: int,
        excluded: torch.Tensor | None,
        *,
        group: ProcessGroup | None = None,
        by_loops: bool = False,
    ) -> Candidates:
        """Candidates for ``places`` of ``width`` columns; None: for all of them.

        For loops on one rank no more than the columns that are not excluded: several ranks gather
        equally many.
        """
        count = width if places is None else min(places, width)
        if not by_loops:
            return cls(count, excluded, None)
        if excluded is None:
            none: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
            return cls(count, None, (none, none))
        mask = excluded.numpy()
        allowed, others = (np.flatnonzero(x).astype(np.int32) for x in (~mask, mask))
        return cls(count if group else min(count, len(allowed)), excluded, (allowed, others))


def select_largest(values: torch.Tensor, candidates: Candidates) -> Largest:
    """``largest_columns`` of ``values`` [C, Vp], with the sum of the other columns."""
    count, excluded, lists = candidates
    if lists is not None and values.dtype == torch.float32:
        return _select_by_loops(values, count, lists)
    chosen, columns = largest_columns(values, count, excluded)
    rest = values.scatter(-1, columns, 0.0)
    if excluded is not None:
        rest.masked_fill_(excluded, 0.0)
    return Largest(chosen, columns, rest.sum(dim=-1, keepdim=True), is_descending=True)


def _select_by_loops(
    values: torch.Tensor, count: int, lists: tuple[NDArray[np.int32], NDArray[np.int32]]
) -> Largest:
    from megatron_ext.ops import selection_loops as loops
    from megatron_ext.ops.row_loops import in_threads

    rows = len(values)
    out = Largest(
        values.new_empty(rows, count),
        torch.empty(rows, count, dtype=torch.int64),
        values.new_empty(rows, 1),
        is_descending=True,
    )
    found = out.values.numpy(), out.columns.numpy(), out.rest[:, 0].numpy()
    given = values.contiguous().numpy(), *lists
    in_threads(lambda a, b: loops.largest_places(a, b, *given, *found), rows)
    return out


class Compared(NamedTuple):
    """Result of the comparison, replicated over the group but for ``signs``."""

    value: torch.Tensor
    """[C] L1 over the compared places."""

    left_out: torch.Tensor
    """[C] mass of both sides beyond the compared places."""

    signs: torch.Tensor
    """int8 [C, Ks] of this rank's student candidates: dL1/dq, 0 beyond the compared places."""


def compare_sorted(
    student: Largest,
    teacher: Largest,
    places: int | None,
    group: ProcessGroup | None,
    *,
    by_loops: bool = False,
    by_kernel: bool = False,
) -> Compared:
    """L1 of the ``places`` largest of all ranks' candidates; None: of all of them.

    One all-gather of [C, Ks + Kt + 2]; none on one rank.

    Args:
        by_loops: Compare in compiled loops what one rank has in descending order, no more than
            ``places`` of it.
        by_kernel: Compare fp32 in a kernel; ``student`` and ``teacher`` are in any order.
    """
    if by_loops and group is None:
        return _compare_by_loops(student, teacher)
    if by_kernel and places is not None:
        return _compare_by_kernel(student, teacher, places, group)
    first, second, rest = _gathered(student, teacher, group)
    alone = group_size(group) == 1
    a, origin = _sorted(first, student.is_descending and alone)
    b, _ = _sorted(second, teacher.is_descending and alone)
    kept = max(a.shape[1], b.shape[1]) if places is None else places
    value, sign = _compare(a[:, :kept], b[:, :kept])
    left_out = rest + a[:, kept:].sum(dim=-1) + b[:, kept:].sum(dim=-1)
    spread = sign.new_zeros(first.shape).scatter_(1, origin[:, :kept], sign)
    count = student.values.shape[1]
    start = 0 if group is None else dist.get_rank(group) * count
    mine = spread[:, start : start + count]
    return Compared(value, left_out, mine.masked_fill(student.values < 0, 0))


def _gathered(
    student: Largest, teacher: Largest, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both sides' candidates of all ranks [C, ranks K], and the sum [C] of what is outside."""
    if group_size(group) == 1:
        return student.values, teacher.values, (student.rest + teacher.rest)[:, 0]
    widths = [side.values.shape[1] for side in (student, teacher)]
    packed = torch.cat([student.values, teacher.values, student.rest, teacher.rest], dim=-1)
    gathered = gather_columns(packed, group).unflatten(-1, (group_size(group), packed.shape[-1]))
    first, second, rest = gathered.split([*widths, 2], dim=-1)
    return first.flatten(1), second.flatten(1), rest.sum(dim=(1, 2))


def _compare_by_kernel(
    student: Largest, teacher: Largest, places: int, group: ProcessGroup | None
) -> Compared:
    """Compare what torch sorts in runs, each rank its own."""
    from megatron_ext.ops.sorted_l1.triton_kernels import compare_places_kernel

    (own, origin), (other, _) = (_sorted_runs(side.values) for side in (student, teacher))
    sides = (student._replace(values=own.flatten(1)), teacher._replace(values=other.flatten(1)))
    first, second, rest = _gathered(*sides, group)
    (own_runs, length), (_, other_length) = own.shape[1:], other.shape[1:]
    runs = first.shape[1] // length, second.shape[1] // other_length
    kept = min(places, second.shape[1])
    value, left_out = torch.empty_like(rest), torch.empty_like(rest)
    signs = torch.empty_like(student.values, dtype=torch.int8)
    if len(rest):
        compare_places_kernel[(len(rest),)](
            first,
            origin,
            second,
            second.new_empty(len(rest), kept),
            rest,
            value,
            left_out,
            signs,
            places,
            kept,
            runs[0],
            length,
            runs[1],
            other_length,
            0 if group is None else dist.get_rank(group) * own_runs,
            own_runs,
            signs.shape[1],
            STUDENT_STEPS=length.bit_length(),
            TEACHER_STEPS=other_length.bit_length(),
            BLOCK=_PLACES,
            num_warps=8,
        )
    return Compared(value, left_out, signs)


def _sorted_runs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` [C, K] in runs [C, R, L], each in descending order, and where in it each was."""
    count = values.shape[1]
    runs = run_count(count)
    if count % runs:
        values = torch.nn.functional.pad(values, (0, -count % runs), value=-1.0)
    ordered, origin = values.unflatten(1, (runs, -1)).sort(dim=-1, descending=True, stable=True)
    return ordered, origin


def run_count(count: int) -> int:
    """Runs in which ``count`` candidates are sorted."""
    return max(-(-count // LONGEST_RUN), 1)


def _compare_by_loops(student: Largest, teacher: Largest) -> Compared:
    from megatron_ext.ops import selection_loops as loops
    from megatron_ext.ops.row_loops import in_threads

    value = student.values.new_empty(len(student.values))
    signs = torch.empty_like(student.values, dtype=torch.int8)
    given = student.values.numpy(), teacher.values.numpy(), value.numpy(), signs.numpy()
    in_threads(lambda a, b: loops.compare_places(a, b, *given), len(value))
    return Compared(value, (student.rest + teacher.rest)[:, 0], signs)


def add_signs_(
    slope: torch.Tensor, student: Largest, compared: Compared, weight: float, *, by_loops: bool
) -> None:
    """Add ``weight dL1/dq`` to ``slope`` [C, Vp] at the student's candidates, in place."""
    if by_loops and slope.dtype == torch.float32:
        from megatron_ext.ops import selection_loops as loops
        from megatron_ext.ops.row_loops import in_threads

        given = student.columns.numpy(), compared.signs.numpy(), np.float32(weight), slope.numpy()
        in_threads(lambda a, b: loops.spread_signs(a, b, *given), len(slope))
        return
    slope.scatter_add_(1, student.columns, compared.signs.to(slope.dtype).mul_(weight))


def _sorted(gathered: torch.Tensor, is_descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' values [C, ranks K] in descending order, at least 0, and where each was.

    A stable sort of candidates in the order of ranks keeps ties in the order of columns; those of
    one rank may be in it.
    """
    if is_descending:
        origin = torch.arange(gathered.shape[1], device=gathered.device).expand_as(gathered)
        return gathered.clamp(min=0), origin
    ordered, origin = gathered.sort(dim=-1, descending=True, stable=True)
    return ordered.clamp(min=0), origin


def _compare(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L1 [C], and the sign of each place of ``a``, int8."""
    missing = b.shape[1] - a.shape[1]
    # A negative padding would cut, so only the narrower side is padded.
    first = torch.nn.functional.pad(a, (0, max(missing, 0)))
    second = torch.nn.functional.pad(b, (0, max(-missing, 0)))
    difference = first - second
    equal = difference.abs() <= _ROUNDING * torch.finfo(a.dtype).eps * (first + second)
    sign = difference.sign().masked_fill_(equal, 0.0).to(torch.int8)
    return difference.abs().sum(dim=-1), sign[:, : a.shape[1]]

"""Sorted L1 over vocabulary shards. C rows, Vp local columns, U compared places.

Equations are in the README; ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import gather_columns, group_size
from megatron_ext.ops.sorted_l1.selection import largest_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ROUNDING: Final = 8
"""Units in the last place within which two probabilities count as equal."""


class SortedL1(NamedTuple):
    """[C] each, replicated over the group; only ``value`` has a graph."""

    value: torch.Tensor

    left_out: torch.Tensor
    """Mass of both sides beyond the compared places: at most so much is missing in ``value``."""


def sorted_l1(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    student_excluded: torch.Tensor | None = None,
    teacher_excluded: torch.Tensor | None = None,
    largest: int | None = None,
    group: ProcessGroup | None = None,
) -> SortedL1:
    """``(student.sort().values - teacher.sort().values).abs().sum(-1)``, zeros filled in.

    Args:
        student: [C, Vps] probabilities, none negative; the only argument with a gradient.
        teacher: [C, Vpt] probabilities; Vpt may differ from Vps.
        student_excluded: bool [Vps], columns that are left out; None: none.
        teacher_excluded: bool [Vpt].
        largest: U, places compared, of the largest probabilities; None: all, which is exact.

    Keeps int32 columns and int8 signs [C, min(U, Vps)] for backward. Collectives: forward one
    all-gather of [C', U_s + U_t + 2] a slice of C' rows; backward none.
    """
    outputs = _SortedL1.apply(
        student, teacher, (student_excluded, teacher_excluded), largest, group
    )
    return SortedL1(*outputs)


class _SortedL1(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        excluded: tuple[torch.Tensor | None, torch.Tensor | None],
        largest: int | None,
        group: ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = group_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        sides = (student.detach(), teacher.to(student.dtype))
        kept = [min(side.shape[1] if largest is None else largest, side.shape[1]) for side in sides]
        count = student.shape[0]
        value, left_out = student.new_empty(2, count)
        columns = torch.empty(count, kept[0], dtype=torch.int32, device=student.device)
        signs = torch.empty(count, kept[0], dtype=torch.int8, device=student.device)
        widest = max(*(side.shape[1] for side in sides), (sum(kept) + 2) * ranks)
        for rows in row_slices(count, widest, device=student.device):
            parts = [
                largest_columns(side[rows], *options)
                for side, options in zip(sides, zip(kept, excluded, strict=True), strict=True)
            ]
            tails = [
                _rest(side[rows], chosen, out)
                for side, (_, chosen), out in zip(sides, parts, excluded, strict=True)
            ]
            packed = torch.cat([*(values for values, _ in parts), *tails], dim=-1)
            gathered = gather_columns(packed, group).unflatten(-1, (ranks, packed.shape[-1]))
            first, second, rest = gathered.split([*kept, 2], dim=-1)
            a, origin, a_tail = _merged(first, largest)
            b, _, b_tail = _merged(second, largest)
            value[rows], sign = _compare(a, b)
            left_out[rows] = rest.sum(dim=(1, 2)) + a_tail + b_tail
            spread = signs.new_zeros(a.shape[0], ranks * kept[0]).scatter_(1, origin, sign)
            mine = spread[:, rank * kept[0] : (rank + 1) * kept[0]]
            values, columns[rows] = parts[0]
            signs[rows] = mine.masked_fill(values < 0, 0)
        ctx.save_for_backward(columns, signs)
        ctx.width, ctx.dtype = student.shape[1], student.dtype
        ctx.mark_non_differentiable(left_out)
        return value, left_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        columns, signs = ctx.saved_tensors
        out = torch.zeros(len(columns), ctx.width, dtype=ctx.dtype, device=columns.device)
        out.scatter_(1, columns.to(torch.int64), signs.to(ctx.dtype).mul_(grad[:, None]))
        return out, None, None, None, None


def _rest(probs: torch.Tensor, chosen: torch.Tensor, excluded: torch.Tensor | None) -> torch.Tensor:
    """This rank's mass outside the chosen columns [C', 1]: a sum of its own, 0 where none is."""
    rest = probs.scatter(-1, chosen, 0.0)
    if excluded is not None:
        rest.masked_fill_(excluded, 0.0)
    return rest.sum(dim=-1, keepdim=True)


def _merged(
    gathered: torch.Tensor, largest: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest of all ranks' values [C', ranks, U], descending; where in them they were; and
    the sum [C'] of the others.

    A stable sort of descending values in the order of ranks keeps ties in the order of columns.
    """
    ordered, origin = gathered.flatten(1).sort(dim=-1, descending=True, stable=True)
    ordered = ordered.clamp_(min=0)
    places = ordered.shape[1] if largest is None else largest
    return ordered[:, :places], origin[:, :places], ordered[:, places:].sum(dim=-1)


def _compare(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L1 [C'], and the sign of each place of ``a``, int8."""
    missing = b.shape[1] - a.shape[1]
    # A negative padding would cut: the narrower side is filled up.
    first = torch.nn.functional.pad(a, (0, max(missing, 0)))
    second = torch.nn.functional.pad(b, (0, max(-missing, 0)))
    difference = first - second
    equal = difference.abs() <= _ROUNDING * torch.finfo(a.dtype).eps * (first + second)
    sign = difference.sign().masked_fill_(equal, 0.0).to(torch.int8)
    return difference.abs().sum(dim=-1), sign[:, : a.shape[1]]

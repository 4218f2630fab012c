"""Sorted L1 with a graph, of probabilities or of the logits of chunks.

C rows or chunks, Vp local columns, U compared places. ``reference.py`` says it in dense torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import group_size
from megatron_ext.distributed.vocab_parallel import row_slices
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.sorted_l1.comparison import compare_sorted, select_largest
from megatron_ext.ops.sorted_l1.evaluation import ChunkSortedL1, evaluate_sorted_l1
from megatron_ext.ops.unit_gradient import kept_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        sides = (student.detach(), teacher.to(student.dtype))
        kept = [min(side.shape[1] if largest is None else largest, side.shape[1]) for side in sides]
        count = student.shape[0]
        value, left_out = student.new_empty(2, count)
        columns = torch.empty(count, kept[0], dtype=torch.int32, device=student.device)
        signs = torch.empty(count, kept[0], dtype=torch.int8, device=student.device)
        widest = max(*(side.shape[1] for side in sides), (sum(kept) + 2) * group_size(group))
        for rows in row_slices(count, widest, device=student.device):
            parts = [
                select_largest(side[rows], *options)
                for side, options in zip(sides, zip(kept, excluded, strict=True), strict=True)
            ]
            value[rows], left_out[rows], signs[rows] = compare_sorted(
                parts[0], parts[1], largest, group
            )
            columns[rows] = parts[0].columns
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


def chunk_sorted_l1(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    *,
    temperature: float = 1.0,
    top_u: int | None = None,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> ChunkSortedL1:
    """``evaluate_sorted_l1`` with a graph from ``chunk_loss`` to the student's logits.

    Args:
        in_place: Write the gradient over the student's logits, which nobody may read afterwards.

    Keeps the gradient [Ts, Vps] for backward, which has no collectives.
    """

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> ChunkSortedL1:
        return evaluate_sorted_l1(
            student._replace(logits=logits),
            teacher,
            temperature=temperature,
            top_u=top_u,
            grad_scale=grad_scale,
            gradient=gradient,
            implementation=implementation,
        )

    values = kept_gradient(
        student.logits,
        evaluate,
        grad_scale=grad_scale,
        slots=student.rows.slots,
        in_place=in_place,
        implementation=implementation,
    )
    return ChunkSortedL1(*values)

"""Divergence over columns that two vocabularies share. Vp local columns, C chunks.

Equations are in the README; ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import VocabShard, local_argmax, merge_argmax
from megatron_ext.ops.divergence import Divergence, divergence_terms
from megatron_ext.ops.matched_divergence.exchange import onto_student_columns


class MatchedDivergence(NamedTuple):
    """[C] each, replicated over the group; only ``value`` has a graph."""

    value: torch.Tensor
    """Nats."""

    student_rest: torch.Tensor
    """The student's mass outside the matched columns."""

    teacher_rest: torch.Tensor

    agreement: torch.Tensor
    """1 where both have the same largest matched column, else 0."""


def matched_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    student_column: torch.Tensor,
    is_common: torch.Tensor,
    with_rest: bool,
    student_shard: VocabShard,
    direction: Divergence = "forward",
    mixture: float = 0.5,
) -> MatchedDivergence:
    """The divergence of chunk distributions over matched columns and a bucket of all others.

    Args:
        student: [C, Vps] probabilities, 0 in padding; the only argument with a gradient.
        teacher: [C, Vpt] probabilities, 0 in padding.
        student_column: int64 [Vpt], the global student column that matches each, -1 for none.
        is_common: bool [Vps], this rank's student columns that have a match.
        with_rest: Compare the masses outside too. Otherwise both sides are normalised over the
            matched columns.
        direction: Of the divergence, see ``ops/divergence``.
        mixture: Weight of the teacher in ``jensen_shannon``.

    Keeps one [C, Vps] for backward. Collectives: forward four all-reduces of [C] and one
    reduce-scatter of [C', Vs] a slice of C' chunks; backward none.
    """
    outputs = _MatchedDivergence.apply(
        student,
        teacher,
        (student_column, is_common),
        with_rest,
        student_shard,
        direction,
        mixture,
    )
    return MatchedDivergence(*outputs)


class _MatchedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        matched: tuple[torch.Tensor, torch.Tensor],
        with_rest: bool,
        shard: VocabShard,
        direction: Divergence,
        mixture: float,
    ) -> tuple[torch.Tensor, ...]:
        student_column, is_common = matched
        group, width = shard.group, student.shape[1]
        sides = ((student, is_common), (teacher, student_column >= 0))
        inside = torch.stack([_masses(*side) for side in sides])
        # [side, common | rest, C]
        masses = all_reduce_sum(inside, group)
        used = masses.sum(dim=1) if with_rest else masses[:, 0]
        used = used.clamp(min=1024 * torch.finfo(used.dtype).tiny)
        slope = torch.empty_like(student)
        sums = student.new_zeros(2, student.shape[0])
        best = torch.zeros_like(sums)
        column = torch.zeros_like(sums, dtype=torch.int64)
        for rows in row_slices(student.shape[0], width * group_size(group), device=student.device):
            moved = onto_student_columns(teacher[rows], student_column, width, group)
            p = moved.to(student.dtype).div_(used[1, rows, None])
            q = student[rows].masked_fill(~is_common, 0.0).div_(used[0, rows, None])
            for side, values in enumerate((p, q)):
                best[side, rows], column[side, rows] = local_argmax(values, shard)
            terms, slope[rows] = _terms(p, q, direction, mixture)
            sums[0, rows] = terms.sum(dim=-1)
            sums[1, rows] = (q * slope[rows]).sum(dim=-1)
        value, centre = all_reduce_sum(sums, group)
        rest = masses[:, 1] / used if with_rest else torch.zeros_like(used)
        rest_terms, rest_slope = _terms(rest[1], rest[0], direction, mixture)
        value, centre = value + rest_terms, centre + rest[0] * rest_slope
        p_top, q_top = merge_argmax(best, column, group)

        ctx.save_for_backward(slope, is_common, centre, rest_slope, used[0])
        ctx.with_rest = with_rest
        outputs = (value, masses[0, 1], masses[1, 1], (p_top == q_top).to(value.dtype))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        slope, is_common, centre, rest_slope, used = ctx.saved_tensors
        out = torch.where(is_common, slope, rest_slope[:, None])
        out.sub_(centre[:, None]).mul_((grad / used)[:, None])
        if not ctx.with_rest:
            out.masked_fill_(~is_common, 0.0)
        return out, None, None, None, None, None, None


def _terms(
    p: torch.Tensor, q: torch.Tensor, direction: Divergence, mixture: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of the divergence of probabilities, and their derivatives by ``q``.

    The derivative is taken at a ``q`` of at least 1024 times the smallest normal number: what
    comes before it in the chain is below that too, so that it fades to zero instead of NaN.
    """
    value, slope = divergence_terms(p.log(), q.log(), direction, mixture)
    return value, slope / q.clamp(min=1024 * torch.finfo(q.dtype).tiny)


def _masses(probs: torch.Tensor, is_common: torch.Tensor) -> torch.Tensor:
    """This rank's mass inside and outside the matched columns, [2, C]."""
    sides = torch.stack([is_common, ~is_common]).to(probs.dtype)
    return sides @ probs.detach().t()

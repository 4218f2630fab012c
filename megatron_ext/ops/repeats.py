"""Split of a text's repeats: how long a run of one teacher token both models expect it to be.

Ts Tt rows, Vp local columns, R compared rows, M members, K steps, U pairs of a teacher row and a
token. Equations are in ``repeats.md``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import VocabShard, accumulation_dtype
from megatron_ext.ops.chunk_rows import local_column
from megatron_ext.ops.divergence import (
    DivergenceOptions,
    divergence_reference,
    divergence_terms,
    log1mexp,
)
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.token_likelihood import TokenRows, evaluate_token_likelihood


class Repeats(NamedTuple):
    """Rows that predict a repeat of a teacher token, and what both models could write there."""

    student_row: torch.Tensor
    """int64 [R]: rows of the flattened student logits, each once."""

    member: torch.Tensor
    """int64 [R, M]: student tokens that are 1, 2, ... copies of the teacher's token, by their
    number; -1 behind the last."""

    reached: torch.Tensor
    """int64 [R, M]: copies of a member less 1, where the teacher's rows say whether the text goes
    on that far; -1 for longer ones. At least the first two of a row are 0 or more."""

    teacher_row: torch.Tensor
    """int64 [U]: rows of the flattened teacher logits."""

    teacher_token: torch.Tensor
    """int64 [U]: the token whose probability is asked of each."""

    step: torch.Tensor
    """int64 [R, K]: the pair that says whether a 2nd, 3rd, ... copy follows; -1 behind the last."""


class RepeatValues(NamedTuple):
    """Divergence of each row, and its derivative."""

    divergence: torch.Tensor
    """[R], replicated over the group; 0 where a model rules out all members."""

    slope: torch.Tensor
    """[R, M] derivative by the members' logits."""


@torch.no_grad()
def evaluate_repeats(
    student: torch.Tensor,
    teacher: torch.Tensor,
    repeats: Repeats,
    shards: tuple[VocabShard, VocabShard],
    options: DivergenceOptions,
    *,
    implementation: Implementation = "auto",
) -> RepeatValues:
    """``D(P_r || Q_r)`` of every row over the numbers of copies, and its slope.

    Args:
        student: [Ts, Vps], any float dtype.
        teacher: [Tt, Vpt]
        shards: Of the student and of the teacher.

    Returns:
        fp32 (fp64 for fp64 logits). Collectives: one all-reduce of [R, M], and two of at most
        [2 U].
    """
    log_p = _log_lengths(_log_steps(teacher, repeats, shards[1], implementation), repeats.reached)
    logits = _members(student, repeats, shards[0]).to(log_p.dtype)
    # One of the models gives no member any probability: nothing can be compared.
    is_ruled_out = ((logits == -torch.inf).all(dim=1) | (log_p == -torch.inf).all(dim=1))[:, None]
    log_p = log_p.masked_fill(is_ruled_out, 0.0)
    log_q = torch.log_softmax(logits.masked_fill(is_ruled_out, 0.0), dim=1)
    last, place = _last(repeats.reached), torch.arange(log_q.shape[1], device=log_q.device)
    in_last = place >= last
    log_last = torch.logsumexp(log_q.masked_fill(~in_last, -torch.inf), dim=1, keepdim=True)
    lengths = torch.where(place == last, log_last, log_q).masked_fill(place > last, -torch.inf)
    log_p, lengths = (
        torch.log_softmax(side / options.temperature, dim=1) for side in (log_p, lengths)
    )
    value, slope = divergence_terms(log_p, lengths, options.direction, options.mixture)
    slope = (slope - lengths.exp() * slope.sum(dim=1, keepdim=True)) / options.temperature
    of_last = slope.gather(1, last) * (log_q - log_last).exp()
    slope = torch.where(in_last, of_last.masked_fill(log_q == -torch.inf, 0.0), slope)
    return RepeatValues(
        value.sum(dim=1).masked_fill(is_ruled_out[:, 0], 0.0),
        slope.masked_fill(is_ruled_out, 0.0),
    )


def add_repeat_gradient_(
    gradient: torch.Tensor, slope: torch.Tensor, repeats: Repeats, shard: VocabShard
) -> None:
    """Add the members' ``slope`` [R, M] to ``gradient`` [Ts, Vps]. No collectives."""
    column = local_column(repeats.member, shard).flatten()
    row = repeats.student_row[:, None].expand_as(repeats.member).flatten()
    # A column is once in its row; those of other ranks add 0 to the first one.
    here = torch.where(column >= 0, slope.flatten(), 0.0)
    gradient.index_put_((row, column.clamp(min=0)), here.to(gradient.dtype), accumulate=True)


def repeat_divergence(
    student: torch.Tensor, values: RepeatValues, repeats: Repeats, shard: VocabShard
) -> torch.Tensor:
    """Divergences [R] of ``values``, with a graph to the logits ``student`` [Ts, Vps] that they are
    of."""
    out: torch.Tensor = _Divergence.apply(student, values, repeats, shard)
    return out


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, values: RepeatValues, repeats: Repeats, shard: VocabShard
    ) -> torch.Tensor:
        ctx.like, ctx.values, ctx.repeats, ctx.shard = logits.detach(), values, repeats, shard
        return values.divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = torch.zeros_like(ctx.like)
        add_repeat_gradient_(gradient, ctx.values.slope * grad[:, None], ctx.repeats, ctx.shard)
        return gradient, None, None, None


def _log_steps(
    teacher: torch.Tensor, repeats: Repeats, shard: VocabShard, implementation: Implementation
) -> torch.Tensor:
    """Log-probability [R, K] of one more copy at each step; 0 behind the last."""
    rows = TokenRows(
        teacher.detach().index_select(0, repeats.teacher_row), repeats.teacher_token, None, shard
    )
    found = evaluate_token_likelihood(rows, implementation=implementation).student.log_prob
    steps = torch.cat([found, found.new_zeros(1)])
    return steps[repeats.step]


def _log_lengths(steps: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """Log-probability [R, M] that the text has as many copies as a member and fewer than the next;
    of the last one that is reached, at least as many. -inf behind it."""
    reach = torch.cat([steps.new_zeros(len(steps), 1), steps.cumsum(dim=1)], dim=1)
    at = reach.gather(1, reached.clamp(min=0))
    following = torch.cat([at[:, 1:], at[:, -1:]], dim=1)
    # Where a length is impossible, so are all longer ones.
    ends = log1mexp((following - at).masked_fill(at == -torch.inf, -torch.inf))
    place = torch.arange(at.shape[1], device=at.device)
    last = _last(reached)
    return torch.where(place < last, at + ends, at).masked_fill(place > last, -torch.inf)


def _last(reached: torch.Tensor) -> torch.Tensor:
    """Place [R, 1] of the last member that is reached."""
    return (reached >= 0).sum(dim=1, keepdim=True) - 1


def _members(student: torch.Tensor, repeats: Repeats, shard: VocabShard) -> torch.Tensor:
    """Logits [R, M] of the members, -inf behind the last. One all-reduce of [R, M]."""
    column = local_column(repeats.member, shard)
    picked = student.detach()[repeats.student_row[:, None], column.clamp(min=0)]
    picked = picked.to(accumulation_dtype(student.dtype))
    whole = all_reduce_sum(torch.where(column >= 0, picked, 0.0), shard.group)
    return whole.masked_fill(repeats.member < 0, -torch.inf)


def repeats_reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    repeats: Repeats,
    options: DivergenceOptions,
) -> torch.Tensor:
    """``D(P_r || Q_r)`` [R], row by row and unsharded, for the tests; autograd differentiates it.

    Args:
        student: [Ts, Vs], whole vocabulary.
        teacher: [Tt, Vt]
    """
    p = torch.softmax(teacher, dim=1)[repeats.teacher_row, repeats.teacher_token]
    divergences = []
    for row, members, reached, steps in zip(
        repeats.student_row.tolist(),
        repeats.member.tolist(),
        repeats.reached.tolist(),
        repeats.step.tolist(),
        strict=True,
    ):
        members = [member for member in members if member >= 0]
        lengths = [length for length in reached if length >= 0]
        q = torch.softmax(student[row, members], dim=0)
        reach = [p.new_ones(())]
        for step in steps:
            if step >= 0:
                reach.append(reach[-1] * p[step])
        expected, own = [], []
        for place, (length, longer) in enumerate(pairwise(lengths)):
            expected.append(reach[length] - reach[longer])
            own.append(q[place])
        expected.append(reach[lengths[-1]])
        own.append(q[len(lengths) - 1 :].sum())
        sides = [torch.stack(side) ** (1 / options.temperature) for side in (expected, own)]
        divergences.append(
            divergence_reference(
                *(side[None] / side.sum() for side in sides),
                direction=options.direction,
                mixture=options.mixture,
            )[0]
        )
    return torch.stack(divergences) if divergences else student.new_zeros(0)

"""Everything of the partition KL that reads a row of logits, gradient by hand.

T rows, Vp local columns, C chunks of one token a side, H chains, S steps, E completions, R rows and
N chosen columns of chains.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    merge_argmax,
    merge_log_sum_exp,
)
from megatron_ext.ops.divergence import Divergence, divergence_terms
from megatron_ext.ops.partition_kl.chains import ChainRows, Chains, ChosenColumns, chosen_columns
from megatron_ext.ops.partition_kl.chosen_logits import add_chosen_gradient_, local_chosen
from megatron_ext.ops.partition_kl.event_divergence import IMPOSSIBLE
from megatron_ext.ops.partition_kl.shared_vocabulary import (
    OneToOne,
    PartitionNorm,
    SharedColumns,
    add_shared_gradient_,
    local_norms,
    partition_norm,
    shared_divergence,
)


class SingleRows(NamedTuple):
    """Rows that predict the chunks of one token a side."""

    student: torch.Tensor
    """int64 [C], each once."""

    teacher: torch.Tensor
    """int64 [C]"""


class Plan(NamedTuple):
    """What the logits are compared by."""

    singles: SingleRows
    shared: SharedColumns
    chains: Chains
    student_shard: VocabShard
    teacher_shard: VocabShard
    temperature: float
    direction: Divergence
    mixture: float


class WithoutGraph(NamedTuple):
    """What comes from the rows without a graph."""

    chosen: torch.Tensor
    """[St + E] the teacher's logits, relative to their row."""
    rest: torch.Tensor
    """[St + H]"""
    log_rests: torch.Tensor
    """[2, C] student and teacher."""
    agreement: torch.Tensor
    """bool [C]"""


class LogitRows(torch.autograd.Function):
    """Divergences of the singles [C], and chosen logits [S + E] and rests [S + H] of the chains.

    Keeps the logits of both models and vectors. Collectives are those of ``partition_kl``.
    """

    @staticmethod
    def forward(
        ctx: Any, student_logits: torch.Tensor, teacher_logits: torch.Tensor | None, plan: Plan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, WithoutGraph]:
        models = [_Model.build(student_logits, plan.student_shard, plan.chains.student, plan)]
        rows = [plan.singles.student]
        if teacher_logits is not None:
            models.append(
                _Model.build(teacher_logits, plan.teacher_shard, plan.chains.teacher, plan)
            )
            rows.append(plan.singles.teacher)
        picked, singles, rests = _statistics(models, rows, plan)
        relative = [
            _relative(logits, rest, model.chosen)
            for logits, rest, model in zip(picked, rests, models, strict=True)
        ]
        norms = [partition_norm(*lse, plan.temperature) for lse in singles]
        divergence, slope_sum, rest_grad, agreement = _compare_singles(models, norms, plan)
        log_rests = torch.stack([norm.log_rest for norm in (norms[0], norms[-1])])

        chosen, rest = relative[0]
        ctx.save_for_backward(
            student_logits, teacher_logits, *rests[0], chosen, slope_sum, rest_grad
        )
        ctx.plan, ctx.chosen, ctx.norms = plan, models[0].chosen, norms
        return divergence, chosen, rest, WithoutGraph(*relative[-1], log_rests, agreement)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_divergence: torch.Tensor,
        grad_chosen: torch.Tensor,
        grad_rest: torch.Tensor,
        _: Any,
    ) -> tuple[torch.Tensor, None, None]:
        logits, teacher, peak, log_sum, chosen, slope_sum, rest_grad = ctx.saved_tensors
        plan: Plan = ctx.plan
        out = torch.zeros_like(logits)
        if teacher is not None:
            pair = _pair([logits, teacher], ctx.norms, plan)
            add_shared_gradient_(out, pair, slope_sum, rest_grad, grad_divergence)
        add_chosen_gradient_(
            out,
            logits,
            ctx.chosen,
            plan.student_shard,
            LogSumExp(peak, log_sum),
            grad_chosen.masked_fill(chosen <= IMPOSSIBLE, 0.0),
            grad_rest,
        )
        return out, None, None


class _Model(NamedTuple):
    """One model's logits, and the columns chosen from the rows of its chains."""

    logits: torch.Tensor
    shard: VocabShard
    shared: torch.Tensor
    chosen: ChosenColumns

    @classmethod
    def build(cls, logits: torch.Tensor, shard: VocabShard, rows: ChainRows, plan: Plan) -> _Model:
        shared = plan.shared.student if shard is plan.student_shard else plan.shared.teacher
        return cls(logits.detach(), shard, shared, chosen_columns(rows, plan.chains))


def _statistics(
    models: list[_Model], singles: list[torch.Tensor], plan: Plan
) -> tuple[list[torch.Tensor], list[LogSumExp], list[LogSumExp]]:
    """Per model: chosen logits [N], norms of its singles [2, C], rests of its chains [R].

    Three all-reduces for all of them.
    """
    group = plan.student_shard.group
    picked: list[torch.Tensor] = []
    peaks: list[torch.Tensor] = []
    totals: list[torch.Tensor] = []
    for model, row in zip(models, singles, strict=True):
        norms = local_norms(model.logits, row, model.shared, model.shard, plan.temperature)
        chosen, *rest = local_chosen(model.logits, model.chosen, model.shard)
        picked.append(chosen)
        for parts, norm, other in zip((peaks, totals), norms, rest, strict=True):
            parts += [norm.flatten(), other]
    sizes = [len(part) for part in peaks]
    merged = merge_log_sum_exp(torch.cat(peaks), torch.cat(totals), group)
    split = [LogSumExp(*parts) for parts in zip(*(x.split(sizes) for x in merged), strict=True)]
    return (
        list(all_reduce_sum(torch.cat(picked), group).split([len(part) for part in picked])),
        [LogSumExp(*(x.view(2, -1) for x in lse)) for lse in split[::2]],
        split[1::2],
    )


def _relative(
    picked: torch.Tensor, rest: LogSumExp, chosen: ChosenColumns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen logits [N] and rests [R] less the peak of their row: near 1e4, fp32 keeps 1e-3 only.

    What has no mass is at ``IMPOSSIBLE``.
    """
    picked = picked.masked_fill(chosen.column < 0, -torch.inf)
    top = rest.peak.masked_fill(rest.log_sum == -torch.inf, -torch.inf)
    top = top.scatter_reduce(0, chosen.place, picked, "amax")
    top = top.masked_fill(top == -torch.inf, 0.0)
    return (
        (picked - top[chosen.place]).clamp(min=IMPOSSIBLE),
        (rest.peak - top).add_(rest.log_sum).clamp(min=IMPOSSIBLE),
    )


def _pair(logits: list[torch.Tensor], norms: list[PartitionNorm], plan: Plan) -> OneToOne:
    return OneToOne(
        logits[0].detach(),
        logits[1].detach(),
        *plan.singles,
        plan.shared,
        plan.student_shard,
        plan.teacher_shard,
        norms[0],
        norms[1],
        plan.temperature,
        plan.direction,
        plan.mixture,
    )


def _compare_singles(
    models: list[_Model], norms: list[PartitionNorm], plan: Plan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divergence, sum of slopes, derivative of the rest's logit and agreement, [C] each.

    Three all-reduces, and those of ``shared_divergence``; none without logits of the teacher.
    """
    log_q = norms[0].log_rest
    if len(models) == 1:
        return log_q.new_zeros(0), log_q, log_q, torch.zeros_like(log_q, dtype=torch.bool)
    log_p = norms[1].log_rest.to(log_q.dtype)
    group = plan.student_shard.group
    local, best, column = shared_divergence(_pair([m.logits for m in models], norms, plan))
    divergence, slope_sum = all_reduce_sum(local, group)
    rest = divergence_terms(log_p, log_q, plan.direction, plan.mixture)
    slope_sum = slope_sum + rest.slope
    # The rest is an event as well, behind every column.
    rests = torch.stack([log_q, log_p])
    column = column.masked_fill(rests > best, len(plan.shared.teacher_column))
    top = merge_argmax(torch.maximum(best, rests), column, group)
    rest_grad = rest.slope - log_q.exp() * slope_sum
    return divergence + rest.value, slope_sum, rest_grad, top[0] == top[1]

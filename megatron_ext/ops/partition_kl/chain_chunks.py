"""Chunks of several tokens on a side, from the logits that they choose. No logits of whole rows.

H chains, N chosen columns and R rows of one model, S steps, E completions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp
from megatron_ext.ops.partition_kl.chain_masses import (
    RowMasses,
    chain_masses,
    event_chains,
    row_masses,
)
from megatron_ext.ops.partition_kl.chains import ChainRows
from megatron_ext.ops.partition_kl.chosen_columns import ChosenColumns
from megatron_ext.ops.partition_kl.event_divergence import (
    IMPOSSIBLE,
    event_divergence,
    segment_top,
)
from megatron_ext.ops.partition_kl.plan import PartitionPlan
from megatron_ext.ops.partition_kl.values import EventComparison


class ChosenLogits(NamedTuple):
    """What the rows of chains say, relative to the row; what has no mass is at ``IMPOSSIBLE``."""

    chosen: torch.Tensor
    """[N]"""

    rest: torch.Tensor
    """[R] log-sum-exp of the other columns."""

    @classmethod
    def of(cls, picked: LogSumExp, others: LogSumExp, columns: ChosenColumns) -> ChosenLogits:
        """From merged logits [N] and statistics [R]: near 1e4, fp32 keeps 1e-3 only."""
        logits = picked.peak + picked.log_sum
        top = others.peak.masked_fill(others.log_sum == -torch.inf, -torch.inf)
        top = top.scatter_reduce(0, columns.place, logits, "amax")
        top = top.masked_fill(top == -torch.inf, 0.0)
        return cls(
            (logits - top[columns.place]).clamp(min=IMPOSSIBLE),
            (others.peak - top).add_(others.log_sum).clamp(min=IMPOSSIBLE),
        )


def compare_chains(
    student: ChosenLogits,
    teacher: ChosenLogits | RowMasses,
    plan: PartitionPlan,
    grad_scale: torch.Tensor | None,
    *,
    with_gradient: bool,
) -> tuple[EventComparison, ChosenLogits]:
    """EventComparison of the H chains without a graph, and the gradients of the student's numbers.

    Args:
        grad_scale: [H] gradient of each divergence; a chain at 0 gets none. None: 1.
        with_gradient: Else there are none, and zeros come back.
    """
    counted = plan.counted
    chosen, rest = (part.detach().requires_grad_(with_gradient) for part in student)
    with torch.set_grad_enabled(with_gradient):
        own = _masses(ChosenLogits(chosen, rest), plan.chains.student, plan)
        if isinstance(teacher, ChosenLogits):
            teacher = _masses(teacher, plan.chains.teacher, plan)
        compared = _compare(own, teacher, plan)
    if not with_gradient or not len(counted):
        none = ChosenLogits(torch.zeros_like(chosen), torch.zeros_like(rest))
        return compared._replace(divergence=compared.divergence.detach()), none
    weight = torch.ones_like(compared.divergence)
    if grad_scale is not None:
        weight = grad_scale.to(weight.dtype)
    grads = torch.autograd.grad(compared.divergence, (chosen, rest), weight)
    unused = (weight == 0) | ~counted
    of_step = unused[plan.chains.student.step_chain]
    grad_chosen = grads[0].masked_fill(chosen <= IMPOSSIBLE, 0.0)
    of_chosen = torch.cat([of_step, unused[plan.chains.completion_chain]])
    return compared._replace(divergence=compared.divergence.detach()), ChosenLogits(
        grad_chosen.masked_fill_(of_chosen, 0.0),
        grads[1].masked_fill(torch.cat([of_step, unused]), 0.0),
    )


def _masses(logits: ChosenLogits, rows: ChainRows, plan: PartitionPlan) -> RowMasses:
    """Log-probabilities at the rows of the counted chains; the others hold something finite."""
    of_step = plan.counted[rows.step_chain]
    of_chosen = torch.cat([of_step, plan.counted[plan.chains.completion_chain]])
    return row_masses(
        torch.where(of_chosen, logits.chosen, 0.0),
        torch.where(torch.cat([of_step, plan.counted]), logits.rest, 0.0),
        plan.chains,
        len(of_step),
    )


def _compare(student: RowMasses, teacher: RowMasses, plan: PartitionPlan) -> EventComparison:
    chains = plan.chains
    sides = [
        torch.cat(chain_masses(masses, rows, chains))
        for masses, rows in ((student, chains.student), (teacher, chains.teacher))
    ]
    segment, count = event_chains(chains), chains.chain_count
    divergence, log_q, log_p = event_divergence(sides[0], sides[1], segment, count, plan.options)
    completions = len(chains.completion_chain)
    return EventComparison(
        torch.where(plan.counted, divergence, 0.0),
        log_q[completions:].exp(),
        log_p[completions:].exp(),
        segment_top(log_q, segment, count) == segment_top(log_p, segment, count),
    )

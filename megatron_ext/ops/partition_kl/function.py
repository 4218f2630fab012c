"""Partition KL over vocabulary shards. T rows, Vp local columns, C chunks of one token a side,
H chains, S steps, E completions, R rows of chains.

Equations and memory are in the README; ``reference.py`` says the same chunk by chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.partition_kl.chain_masses import (
    RowMasses,
    chain_masses,
    event_chains,
    row_masses,
)
from megatron_ext.ops.partition_kl.chains import ChainRows, Chains
from megatron_ext.ops.partition_kl.event_divergence import event_divergence, segment_top
from megatron_ext.ops.partition_kl.logit_rows import LogitRows, Plan, SingleRows
from megatron_ext.ops.partition_kl.shared_vocabulary import SharedColumns


class Comparison(NamedTuple):
    """One number a chunk, replicated over the group; only ``divergence`` has a graph."""

    divergence: torch.Tensor
    """D, in nats, without tau^2."""

    student_rest: torch.Tensor
    """Probability of the rest, at the temperature."""

    teacher_rest: torch.Tensor

    agreement: torch.Tensor
    """bool: both models have the same most probable event."""


def partition_kl(
    student_logits: torch.Tensor,
    teacher: torch.Tensor | RowMasses,
    *,
    singles: SingleRows,
    shared: SharedColumns,
    chains: Chains,
    counted: torch.Tensor,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    temperature: float = 1.0,
    direction: Divergence = "forward",
    mixture: float = 0.5,
) -> tuple[Comparison, Comparison]:
    """D(P_c || Q_c) over the events that both models have, by chunk (README, equations 1 to 8).

    Args:
        student_logits: [Ts, Vps], any float dtype; the only argument with a gradient.
        teacher: Logits [Tt, Vpt], any float dtype. Or what the teacher gives the rows of the
            chains, the same on every rank; then there are no ``singles``.
        singles: Rows of chunks of one token a side.
        shared: The tokens over which these are compared.
        chains: Rows and completions of the other chunks. No student row is in two chunks.
        counted: bool [H]: chains to look at; the others have a divergence of 0.

    Returns:
        Comparisons of the C singles and of the H chains.

    Everything is accumulated in fp32 (fp64 for fp64 logits). Collectives on the shards' group,
    equally many on every rank and independent of the data: forward 3 all-reduces of [R] or [S + E],
    and where the teacher gives logits 3 more of [C] and one reduce-scatter of [C', V] a slice of
    C' singles; backward one reduce-scatter a slice of singles.
    """
    plan = Plan(
        singles, shared, chains, student_shard, teacher_shard, temperature, direction, mixture
    )
    logits, masses = (teacher, None) if isinstance(teacher, torch.Tensor) else (None, teacher)
    divergence, chosen, rest, others = LogitRows.apply(student_logits, logits, plan)
    student_masses = _masses(chosen, rest, chains.student, chains, counted)
    if masses is None:
        masses = _masses(others.chosen, others.rest, chains.teacher, chains, counted)
    probs = others.log_rests.exp()
    return (
        Comparison(divergence, probs[0], probs[1], others.agreement),
        _compare_chains(student_masses, masses, plan, counted),
    )


def _masses(
    chosen: torch.Tensor, rest: torch.Tensor, rows: ChainRows, chains: Chains, counted: torch.Tensor
) -> RowMasses:
    """Log-probabilities at the rows of the counted chains; the others hold something finite."""
    of_step = counted[rows.step_chain]
    of_chosen = torch.cat([of_step, counted[chains.completion_chain]])
    return row_masses(
        torch.where(of_chosen, chosen, 0.0),
        torch.where(torch.cat([of_step, counted]), rest, 0.0),
        chains,
        len(of_step),
    )


def _compare_chains(
    student: RowMasses, teacher: RowMasses, plan: Plan, counted: torch.Tensor
) -> Comparison:
    chains = plan.chains
    sides = [
        torch.cat(chain_masses(masses, rows, chains))
        for masses, rows in ((student, chains.student), (teacher, chains.teacher))
    ]
    segment, count = event_chains(chains), chains.chain_count
    divergence, log_q, log_p = event_divergence(
        sides[0],
        sides[1],
        segment,
        count,
        temperature=plan.temperature,
        direction=plan.direction,
        mixture=plan.mixture,
    )
    completions = len(chains.completion_chain)
    return Comparison(
        torch.where(counted, divergence, 0.0),
        log_q[completions:].exp(),
        log_p[completions:].exp(),
        segment_top(log_q, segment, chains.chain_count)
        == segment_top(log_p, segment, chains.chain_count),
    )

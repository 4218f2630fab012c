"""Operands and results of the partition KL, and its dense reference, chunk by chunk.

T rows, V columns, Vp local columns, C chunks of one token a side, H chains of S steps and E
completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import DivergenceOptions, divergence_reference
from megatron_ext.ops.partition_kl.shared_columns import SharedColumns


class SingleRows(NamedTuple):
    """Rows that predict the chunks of one token a side. C chunks."""

    student: torch.Tensor
    """int64 [C], each once."""

    teacher: torch.Tensor
    """int64 [C]"""


class ChainRows(NamedTuple):
    """One model's rows of all chains: an observed prefix, step by step, and a last prediction.

    No row comes twice.
    """

    step_row: torch.Tensor
    """int64 [S]: row of the logits that predicts a token of an observed prefix."""

    step_label: torch.Tensor
    """int64 [S]: the observed token."""

    step_chain: torch.Tensor
    """int64 [S] ascending: the chain it belongs to."""

    step_place: torch.Tensor
    """int64 [S] ascending in a chain: number of tokens of the chain before it."""

    last_row: torch.Tensor
    """int64 [H]: row that predicts the token after the prefix."""

    completion: torch.Tensor
    """int64 [E]: possible tokens after the prefix, each once in a chain; negative for none."""


class ChainEdges(NamedTuple):
    """Where each chain begins among ascending numbers of chains, int32 [H + 1] each."""

    student_steps: torch.Tensor
    teacher_steps: torch.Tensor
    completions: torch.Tensor

    @classmethod
    def of(cls, numbers: Sequence[torch.Tensor], chain_count: int) -> ChainEdges:
        """Find them among the chains of both sides' steps and of completions."""
        bounds = torch.arange(chain_count + 1, device=numbers[0].device)
        return cls(*(torch.searchsorted(each, bounds, out_int32=True) for each in numbers))


class Chains(NamedTuple):
    """Both models' rows of the same chunks; completion ``e`` is the same text on both sides."""

    student: ChainRows
    teacher: ChainRows

    completion_chain: torch.Tensor
    """int64 [E] ascending: the chain of each completion."""

    completion_pointers: tuple[int, ...]
    """[H + 1] start of each chain's completions, on the host."""

    longest: int
    """Most steps of a chain on either side, on the host."""

    edges: ChainEdges | None = None
    """None: to be found where they are needed, in four launches."""

    @property
    def chain_count(self) -> int:
        """H."""
        return len(self.completion_pointers) - 1

    def found_edges(self) -> ChainEdges:
        """``edges``."""
        numbers = self.student.step_chain, self.teacher.step_chain, self.completion_chain
        return self.edges or ChainEdges.of(numbers, self.chain_count)


class PartitionPlan(NamedTuple):
    """Rows, tokens and options of one comparison."""

    singles: SingleRows
    """Rows of chunks of one token a side."""

    shared: SharedColumns
    """Shared tokens over which singles are compared."""

    chains: Chains
    """Rows and completions of the other chunks. No student row is in two chunks."""

    counted: torch.Tensor
    """bool [H]: chains to compare; the others have a divergence of 0."""

    student_shard: VocabShard
    teacher_shard: VocabShard
    options: DivergenceOptions = DivergenceOptions()


class EventComparison(NamedTuple):
    """Comparison of each chunk, replicated over the group; only ``divergence`` can have a graph."""

    divergence: torch.Tensor
    """D, in nats, without tau^2."""

    student_rest: torch.Tensor
    """Probability of the rest, at the temperature."""

    teacher_rest: torch.Tensor

    agreement: torch.Tensor
    """bool: True where both models have the same most probable event."""


class PartitionValues(NamedTuple):
    """Result of an evaluation, without a graph, replicated over the group. T student rows."""

    singles: EventComparison
    """[C]"""

    chains: EventComparison
    """[H]"""

    token_loss: torch.Tensor | None
    """[T] cross-entropy of each label, 0 where there is none; None without labels."""

    top_column: torch.Tensor | None = None
    """int64 [T]: global column of the largest logit, the first of equals; None without labels."""

    bad: Callable[[], list[torch.Tensor]] = list
    """Function that makes [T] of the student, and of the teacher's logits: NaN of rows with NaN or
    +inf on any rank, among those that were read."""

    def divergences(self) -> torch.Tensor:
        """Divergences [C + H], singles first."""
        return torch.cat([self.singles.divergence, self.chains.divergence])


class ReferenceChunk(NamedTuple):
    """One chunk of the reference: rows of both models, their prefixes, and pairs of completions."""

    student_rows: Sequence[int]
    teacher_rows: Sequence[int]
    student_prefix: Sequence[int]
    """Tokens at all student rows but the last."""
    teacher_prefix: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    """Student and teacher tokens at the last rows that are the same text after the prefixes."""


def partition_kl_reference(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    chunks: Sequence[ReferenceChunk],
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    mixture: float = 0.5,
) -> torch.Tensor:
    """D(P_c || Q_c) of each chunk; differentiable by autograd.

    Args:
        student_logits: [Ts, Vs]
        teacher_logits: [Tt, Vt]
    """
    q, p = torch.softmax(student_logits, dim=-1), torch.softmax(teacher_logits, dim=-1)
    divergences = []
    for chunk in chunks:
        sides = [
            _events(q, chunk.student_rows, chunk.student_prefix, [s for s, _ in chunk.pairs]),
            _events(p, chunk.teacher_rows, chunk.teacher_prefix, [t for _, t in chunk.pairs]),
        ]
        possible = (sides[0] > 0) | (sides[1] > 0)
        tempered = [events[possible] ** (1 / temperature) for events in sides]
        first, second = (events / events.sum() for events in tempered)
        divergences.append(
            divergence_reference(second, first, direction=direction, mixture=mixture)
        )
    return torch.stack(divergences) if divergences else student_logits.sum() * torch.zeros(0)


def _events(
    probs: torch.Tensor, rows: Sequence[int], prefix: Sequence[int], last: Sequence[int]
) -> torch.Tensor:
    """Probability of the prefix followed by each of ``last``, and of anything else."""
    reached = probs.new_ones(())
    rest = probs.new_zeros(())
    for row, token in zip(rows, prefix, strict=False):
        rest = rest + reached * _apart(probs[row], [token])[1]
        reached = reached * probs[row, token]
    chosen, others = _apart(probs[rows[-1]], last)
    return torch.cat([reached * chosen, (rest + reached * others)[None]])


def _apart(row: torch.Tensor, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen columns of a row, and the sum of the others."""
    index = torch.tensor(list(chosen), dtype=torch.int64)
    others = torch.ones_like(row, dtype=torch.bool)
    others[index] = False
    return row[index], row[others].sum()

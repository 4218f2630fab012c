"""Events of chains: their columns, their log-masses, and the divergence of two models' masses.

R rows of chains, N chosen columns, Vp local columns, S steps, H chains, E completions, L longest
chain; N events of G segments. Plain autograd: no tensor is larger than these.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import index_sum, local_column
from megatron_ext.ops.divergence import DivergenceOptions, divergence_terms
from megatron_ext.ops.partition_kl.operands import ChainRows, Chains
from megatron_ext.ops.unit_gradient import kept_gradient


class ChosenColumns(NamedTuple):
    """Chosen columns of the rows of chains in a [T, Vp] tensor; steps first, then last rows."""

    row: torch.Tensor
    """int64 [R]: rows of the logits, each once."""

    column: torch.Tensor
    """int64 [N]: chosen columns over all shards, those of a row together and each once; negative
    for none."""

    local: torch.Tensor
    """int64 [N]: this rank's column, -1 where it has none."""

    place: torch.Tensor
    """int64 [N] ascending: index among the R rows."""

    pointers: tuple[int, ...]
    """[R + 1] start of each row's columns, on the host; () where a kernel looked them up."""

    row_of: torch.Tensor | None = None
    """int64 [N]: row of the logits of each column, where a kernel looked them up."""

    @classmethod
    def of(cls, rows: ChainRows, chains: Chains, shard: VocabShard) -> ChosenColumns:
        """Choose the label of every step and the completions of every last row, S + H rows."""
        steps = len(rows.step_row)
        device = rows.step_row.device
        column = torch.cat([rows.step_label, rows.completion])
        return cls(
            row=torch.cat([rows.step_row, rows.last_row]),
            column=column,
            local=local_column(column, shard),
            place=torch.cat([torch.arange(steps, device=device), chains.completion_chain + steps]),
            pointers=(
                *range(steps),
                *(steps + pointer for pointer in chains.completion_pointers),
            ),
        )

    @classmethod
    def none(cls, rows: ChainRows, *_: object) -> ChosenColumns:
        """No row and no column, on the device of ``rows``."""
        nothing = rows.last_row[:0]
        return cls(nothing, nothing, nothing, nothing, (0,))

    def at_rows(self) -> torch.Tensor:
        """Row of the logits of each chosen column, int64 [N]."""
        return self.row[self.place] if self.row_of is None else self.row_of

    def entries(self, part: slice) -> slice:
        """Range of the chosen columns of some of the R rows."""
        return slice(self.pointers[part.start], self.pointers[part.stop])

    def mask(self, part: slice, width: int) -> torch.Tensor:
        """Mask of this rank's chosen columns in some of the R rows, bool [R', width]."""
        entries = self.entries(part)
        local = self.local[entries]
        # Columns of other ranks are written beyond the end, where nothing reads them.
        column = torch.where(local < 0, width, local)
        shape = (part.stop - part.start, width + 1)
        mask = torch.zeros(shape, dtype=torch.bool, device=local.device)
        mask[self.place[entries] - part.start, column] = True
        return mask[:, :width]


IMPOSSIBLE: Final = -1e9
"""Log-mass of an impossible event: finite, so that its sums and gradients are finite."""


def segment_log_softmax(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """``values`` [N] minus the log-sum-exp of their segment; finite values, ids below ``count``."""
    peak = values.detach().new_full((count,), -torch.inf)
    peak = peak.scatter_reduce(0, segment, values.detach(), "amax")
    shifted = values - peak[segment]
    total = index_sum(shifted.exp(), segment, count)
    return shifted - total[segment].log()


def event_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    segment: torch.Tensor,
    count: int,
    options: DivergenceOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """D(P || Q) [G] of each segment's events at a temperature.

    Args:
        student: [N] log-masses; the only argument with a gradient. Values below half
            of ``IMPOSSIBLE`` are no event.
        teacher: [N]
        segment: int64 [N]

    Returns:
        D [G]; log Q and log P [N] at the temperature, without a graph, -inf for impossible events.
    """

    def evaluate(
        events: torch.Tensor, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_q, log_p = (
            segment_log_softmax(side / options.temperature, segment, count).masked_fill_(
                side < IMPOSSIBLE / 2, -torch.inf
            )
            for side in (events[:, 0], teacher.to(events.dtype))
        )
        terms = divergence_terms(log_p, log_q, options.direction, options.mixture)
        if gradient is not None:
            total = index_sum(terms.slope, segment, count)
            slope = (terms.slope - log_q.exp() * total[segment]).div_(options.temperature)
            gradient.copy_(slope[:, None])
        return index_sum(terms.value, segment, count), log_q, log_p

    # Kernels compare chains on their own.
    divergence, log_q, log_p = kept_gradient(
        student[:, None], evaluate, slots=segment, implementation="torch"
    )
    return divergence, log_q, log_p


def segment_top(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Index into ``values`` [N] of the largest of each segment [G], the first on a tie."""
    peak = values.new_full((count,), -torch.inf).scatter_reduce(0, segment, values, "amax")
    index = torch.arange(len(values), device=values.device)
    index = index.masked_fill(values < peak[segment], len(values))
    first = torch.full((count,), len(values), dtype=torch.int64, device=values.device)
    return first.scatter_reduce(0, segment, index, "amin")


class RowMasses(NamedTuple):
    """Log-masses of the chosen columns of each row, and of all its other columns together."""

    step: torch.Tensor
    """[S] log-mass of the observed token."""

    step_rest: torch.Tensor
    """[S] log-mass of all other tokens."""

    completion: torch.Tensor
    """[E]"""

    last_rest: torch.Tensor
    """[H] log-mass of all tokens that are no completion."""


def event_chains(chains: Chains) -> torch.Tensor:
    """Chain of every completion and then of every rest, int64 [E + H]."""
    chain = chains.completion_chain
    return torch.cat([chain, torch.arange(chains.chain_count, device=chain.device)])


def row_masses(chosen: torch.Tensor, rest: torch.Tensor, chains: Chains, steps: int) -> RowMasses:
    """Softmax over the chosen columns and the rest of every row.

    Args:
        chosen: [S + E] logits, finite, of any common shift in a row.
        rest: [S + H] log-sum-exp of the other columns with the same shift.
        steps: S.
    """
    margin = chosen[:steps] - rest[:steps]
    last = torch.cat([chosen[steps:], rest[steps:]])
    rest_chain = torch.arange(chains.chain_count, device=rest.device)
    log_probs = segment_log_softmax(
        last, torch.cat([chains.completion_chain, rest_chain]), chains.chain_count
    )
    completions = len(chains.completion_chain)
    return RowMasses(
        torch.nn.functional.logsigmoid(margin),
        torch.nn.functional.logsigmoid(-margin),
        log_probs[:completions],
        log_probs[completions:],
    )


def chain_masses(
    masses: RowMasses, rows: ChainRows, chains: Chains
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-mass [E] of "the prefix and then this completion", and [H] of anything else.

    The rest is a sum over the first place of divergence, whose terms are all positive, instead of 1
    minus the events (README, equation 7).
    """
    shape = (chains.chain_count, chains.longest)
    at = (rows.step_chain, rows.step_place)
    taken = masses.step.new_zeros(shape).index_put(at, masses.step)
    left = masses.step.new_full(shape, IMPOSSIBLE).index_put(at, masses.step_rest)
    until = torch.nn.functional.pad(taken.cumsum(dim=1), (1, 0))
    prefix = until[:, -1]
    departures = torch.cat([until[:, :-1] + left, (prefix + masses.last_rest)[:, None]], dim=1)
    return (
        prefix[chains.completion_chain] + masses.completion,
        torch.logsumexp(departures, dim=1),
    )

"""From log-probabilities at each row of a chain to log-masses of the chain's events.

S steps, H chains, E completions, L longest chain. Plain autograd: nothing here is wider than that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.ops.partition_kl.chains import ChainRows, Chains
from megatron_ext.ops.partition_kl.event_divergence import IMPOSSIBLE, segment_log_softmax


class RowMasses(NamedTuple):
    """What a model gives the chosen columns of each row, and all the others together; log."""

    step: torch.Tensor
    """[S] the observed token."""

    step_rest: torch.Tensor
    """[S] any other."""

    completion: torch.Tensor
    """[E]"""

    last_rest: torch.Tensor
    """[H] none of the completions."""


def event_chains(chains: Chains) -> torch.Tensor:
    """int64 [E + H]: the chain of every completion, and of every rest behind them."""
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
    own = torch.arange(chains.chain_count, device=rest.device)
    log_probs = segment_log_softmax(
        last, torch.cat([chains.completion_chain, own]), chains.chain_count
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

    The rest is the sum over the first place at which something else comes, all of whose terms are
    positive, instead of 1 minus the events (README, equation 7).
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

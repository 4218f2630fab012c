"""Log-probabilities of a few tokens a row, and of all other tokens together.

T rows, K tokens, Vp local columns. Equations are in the README.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)


def selected_log_prob(
    logits: torch.Tensor, token_id: torch.Tensor, shard: VocabShard, *, temperature: float = 1.0
) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` at ``token_id``, and the logarithm of the rest's mass.

    Args:
        logits: [T, Vp], any float dtype; neither copied whole nor overwritten.
        token_id: int64 [T, K], global and each once in a row; a negative id is no token and gives
            -inf. The same on every rank.

    Returns:
        [T, K + 1] fp32 (fp64 for fp64 logits), replicated over the group, the rest last. The rest
        is summed from its own columns, so it is exact where the selected ones hold nearly all.
        Forward: two all-reduces of [T] and one of [T, K]. Backward: none; keeps ``logits``, four
        vectors and two tensors [T, K]. A row that gets no gradient gives none.
    """
    out: torch.Tensor = _SelectedLogProb.apply(logits, token_id, shard, temperature)
    return out


class _SelectedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        token_id: torch.Tensor,
        shard: VocabShard,
        temperature: float,
    ) -> torch.Tensor:
        excluded = shard.excluded_columns(logits.device)
        picked, peak, total = _local(logits, token_id, shard, temperature, excluded)
        rest = merge_log_sum_exp(peak, total, shard.group)
        picked = all_reduce_sum(picked, shard.group).masked_fill(token_id < 0, -torch.inf)

        entries = torch.cat([picked, (rest.peak + rest.log_sum)[:, None]], dim=-1)
        top = entries.amax(dim=-1)
        top = top.masked_fill(top == -torch.inf, 0.0)
        # Peaks first: the difference of two large numbers is exact, their sums are not.
        entries = torch.cat(
            [picked - top[:, None], ((rest.peak - top) + rest.log_sum)[:, None]], dim=-1
        )
        log_total = entries.exp().sum(dim=-1).log()
        log_prob = entries - log_total[:, None]

        ctx.save_for_backward(logits, token_id, *rest, top, log_total, log_prob)
        ctx.shard, ctx.temperature = shard, temperature
        return log_prob

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, token_id, rest_peak, rest_log_sum, top, log_total, log_prob = ctx.saved_tensors
        shard, temperature = ctx.shard, ctx.temperature
        excluded = shard.excluded_columns(logits.device)
        # Tokens without mass get no gradient.
        grad = grad.masked_fill(log_prob == -torch.inf, 0.0).div(temperature)
        total, of_rest = grad.sum(dim=-1, keepdim=True), grad[:, -1:]
        unused = (grad == 0).all(dim=-1, keepdim=True)
        whole, rest = LogSumExp(top, log_total), LogSumExp(rest_peak, rest_log_sum)
        # An empty rest has no columns with mass: any finite number will do.
        rest = rest._replace(log_sum=rest_log_sum.masked_fill(rest_log_sum == -torch.inf, 0.0))
        out = torch.empty_like(logits)
        for rows in row_slices(*logits.shape, device=logits.device):
            scaled = scaled_logits(logits[rows], temperature, excluded)
            column, here = _columns(token_id[rows], shard)
            selected = _is_selected(column, here, scaled)
            shares = rest.normalise_(scaled.masked_fill(selected, -torch.inf), rows).exp_()
            part = whole.normalise_(scaled, rows).exp_().mul_(-total[rows])
            part.add_(shares.mul_(of_rest[rows]))
            part.scatter_add_(-1, column, torch.where(here, grad[rows, :-1], 0.0))
            out[rows] = part.masked_fill_(unused[rows], 0.0)
        return out, None, None, None


def _local(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    excluded: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's selected logits [T, K], 0 for others; peak and sum [T] of its rest."""
    slices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        column, here = _columns(token_id[rows], shard)
        picked = torch.where(here, scaled.gather(-1, column), 0.0)
        scaled.masked_fill_(_is_selected(column, here, scaled), -torch.inf)
        peak = scaled.amax(dim=-1)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        slices.append((picked, peak, scaled.sub_(peak[:, None]).exp_().sum(dim=-1)))
    if not slices:
        empty = scaled_logits(logits[:, 0], temperature, None)
        return empty.new_zeros(token_id.shape), empty, empty.clone()
    picked, peak, total = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return picked, peak, total


def _columns(token_id: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's column of each token, 0 for those of other ranks, and a mask of its own."""
    column = token_id - shard.start
    here = (column >= 0) & (column < shard.valid_width) & (token_id >= 0)
    return torch.where(here, column, 0), here


def _is_selected(column: torch.Tensor, here: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Selected columns of this rank, bool [T', Vp]."""
    hits = torch.zeros_like(like, dtype=torch.int32)
    return hits.scatter_add_(-1, column, here.to(torch.int32)) > 0


def selected_log_prob_reference(
    logits: torch.Tensor, token_id: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Dense reference [T, K + 1] of logits [T, V] and ids [T, K], negative for no token."""
    probs = torch.softmax(logits / temperature, dim=-1)
    is_selected = torch.zeros_like(probs, dtype=torch.bool)
    for row, ids in enumerate(token_id):
        is_selected[row, ids[ids >= 0]] = True
    picked = probs.gather(-1, token_id.clamp(min=0))
    rest = torch.where(is_selected, 0.0, probs).sum(dim=-1, keepdim=True)
    return torch.cat([torch.where(token_id >= 0, picked, 0.0), rest], dim=-1).log()

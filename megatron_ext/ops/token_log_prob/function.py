"""Log-probability of given tokens over vocabulary shards. T rows, Vp local columns."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    local_log_sum_exp,
    merge_log_sum_exp,
    scaled_logits,
)


def token_log_prob(
    logits: torch.Tensor, token_id: torch.Tensor, shard: VocabShard, *, temperature: float = 1.0
) -> torch.Tensor:
    """``log_softmax(logits / temperature)[t, token_id[t]]``, replicated over the group.

    Args:
        logits: [T, Vp], any float dtype; neither copied whole nor overwritten.
        token_id: int64 [T]. A negative id gives 0 without a gradient; an id at or beyond the
            vocabulary gives NaN, since to raise the host would have to wait for the device. A row
            that gets no gradient gives none, whatever it holds.

    Returns:
        [T] fp32 (fp64 for fp64 logits). Forward: three all-reduces of [T]. Backward: none; keeps
        ``logits`` and five vectors.
    """
    out: torch.Tensor = _TokenLogProb.apply(logits, token_id, shard, temperature)
    return out


class _TokenLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        token_id: torch.Tensor,
        shard: VocabShard,
        temperature: float,
    ) -> torch.Tensor:
        excluded = shard.excluded_columns(logits.device)
        local = local_log_sum_exp(logits, temperature, excluded)
        lse = merge_log_sum_exp(*local, shard.group)
        column = token_id - shard.start
        here = (column >= 0) & (column < shard.valid_width)
        column = torch.where(here, column, 0)
        picked = logits.detach().gather(-1, column[:, None])[:, 0].to(lse.peak.dtype) / temperature
        picked = all_reduce_sum(torch.where(here, picked, 0.0), shard.group)
        log_prob = (picked - lse.peak).sub_(lse.log_sum)
        log_prob.masked_fill_(token_id >= shard.vocab_size, torch.nan)

        ctx.save_for_backward(logits, *lse, token_id, here, column)
        ctx.excluded, ctx.temperature = excluded, temperature
        return log_prob.masked_fill_(token_id < 0, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, *lse, token_id, here, column = ctx.saved_tensors
        scale = grad.masked_fill(token_id < 0, 0.0).div(ctx.temperature)[:, None]
        picked = torch.where(here[:, None], scale, 0.0)
        out = torch.empty_like(logits)
        for rows in row_slices(*logits.shape, device=logits.device):
            scaled = scaled_logits(logits[rows], ctx.temperature, ctx.excluded)
            probs = LogSumExp(*lse).normalise_(scaled, rows).exp_().mul_(-scale[rows])
            probs.scatter_add_(-1, column[rows, None], picked[rows])
            out[rows] = probs.masked_fill_(scale[rows] == 0, 0.0)
        return out, None, None, None

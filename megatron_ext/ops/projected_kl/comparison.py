"""How far two chunk distributions are apart, column by column. C chunks, Vpt local columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, gather_columns
from megatron_ext.ops.divergence import Divergence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ColumnTerms(NamedTuple):
    """What a few chunks contribute, column by column."""

    slope: torch.Tensor
    """[C, Vpt] dD_c/dQ_c of this rank's columns, the columns taken as free of one another."""

    value: torch.Tensor
    """[C, Vpt] terms of D_c."""

    centre: torch.Tensor
    """[C, Vpt] terms of sum_t Q_c[t] slope[t]; of no meaning for ``forward``, where that is -1."""


def compare(
    p: torch.Tensor,
    projected: torch.Tensor,
    mass: torch.Tensor,
    divergence: Divergence,
    mixture: float,
) -> ColumnTerms:
    """Terms of D(P || Q) with Q = projected / mass (README, equations 5 and 7 to 9)."""
    floor = probability_floor(p)
    log_p = p.clamp(min=floor).log_()
    if divergence == "forward":
        held = projected.clamp(min=floor)
        value = log_p.sub_(torch.log(held).sub_(mass.log())).mul_(p)
        return ColumnTerms(torch.div(p, held).mul_(-mass), value, value)
    q = projected / mass
    log_q = projected.clamp(min=floor).log_().sub_(mass.log())
    if divergence == "reverse":
        log_ratio = log_q.sub_(log_p)
        value = q * log_ratio
        return ColumnTerms(log_ratio, value, value)
    log_mix = (mixture * p + (1 - mixture) * q).clamp_(min=floor).log_()
    slope = log_q.sub_(log_mix).mul_(1 - mixture)
    centre = q * slope
    return ColumnTerms(slope, (p * log_p.sub_(log_mix)).mul_(mixture).add_(centre), centre)


def probability_floor(like: torch.Tensor) -> float:
    """What probabilities are clamped at before a logarithm or a division.

    A column whose Q~ underflows (some 80 nats below the student's largest logit) costs
    ``p * -log(floor)`` instead of infinity. Its gradient is ``-p / floor`` times probabilities
    below the floor, so it fades to zero with Q~ instead of turning into NaN. 1024 times the
    smallest normal number keeps ``log(floor) / floor`` finite and clear of flushed denormals.
    """
    return 1024 * torch.finfo(like.dtype).tiny


def kept_threshold(
    p: torch.Tensor, vocab_topk: int, vocab_size: int, group: ProcessGroup | None
) -> torch.Tensor | None:
    """The ``vocab_topk``-th largest probability of each chunk [C], over all shards.

    None where that is every column. Columns below it make up the rest; of equals all are kept, so
    that which ones are does not depend on the layout. One all-gather of [C, vocab_topk].
    """
    if vocab_topk >= vocab_size:
        return None
    local = p.topk(min(vocab_topk, p.shape[-1]), dim=-1).values
    everywhere = gather_columns(local, group)
    return everywhere.topk(min(vocab_topk, everywhere.shape[-1]), dim=-1).values[:, -1]


def pool_rest(
    p: torch.Tensor, projected: torch.Tensor, rest: torch.Tensor, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``p`` and ``projected`` with the pooled masses in every column of ``rest``, and these [2, C].

    The masses are sums of what is pooled, not one minus what is kept: a small rest stays exact.
    One all-reduce of [2, C].
    """
    sides = (p, projected)
    local = torch.stack([torch.where(rest, side, 0.0).sum(dim=-1) for side in sides])
    pooled = all_reduce_sum(local, group)
    p, projected = (
        torch.where(rest, mass[:, None], side) for mass, side in zip(pooled, sides, strict=True)
    )
    return p, projected, pooled

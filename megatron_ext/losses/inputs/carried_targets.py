"""A teacher's distribution on the student's vocabulary. C rows, Vps Vpt local columns."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, gather_columns, group_size
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    local_log_sum_exp,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.losses.inputs.projection_shard import ProjectionShard

Sharing = Literal["split", "copy"]


class CarriedTargets(NamedTuple):
    """Without a graph."""

    log_probs: torch.Tensor
    """[C, Vps] fp32 (fp64 for fp64 logits): logarithms, not normalised; -inf without mass."""

    offsupport_mass: torch.Tensor
    """[C]: the teacher's mass on tokens that no student token maps to."""

    is_empty: torch.Tensor
    """bool [C]: the teacher allows (has a logit above -inf at) no token that something maps to,
    though it does allow others. There is no distribution then."""


@torch.no_grad()
def carried_targets(
    teacher_logits: torch.Tensor,
    projection: ProjectionShard,
    *,
    teacher_shard: VocabShard,
    temperature: float,
    sharing: Sharing,
) -> CarriedTargets:
    """``log( p diag(1 / n) W^T )`` for ``p = softmax(logits / temperature)``.

    W [Vs, Vt] is the projection and n[t] its column sum, the number of student tokens that map to
    t; with ``sharing`` "copy" n is 1.

    Args:
        teacher_logits: [C, Vpt], any float dtype.
        projection: This rank's rows of W.

    p is over the tokens that something maps to: a teacher that is certain of another token still
    has a distribution over these.

    Collectives: three all-reduces, of [2, C] twice and of [Vt], and one all-gather of [C', Vt] a
    slice of C' rows.
    """
    group = teacher_shard.group
    device = teacher_logits.device
    excluded = (
        teacher_shard.excluded_columns(device),
        teacher_shard.excluded_columns(device, projection.reachable),
    )
    local = [local_log_sum_exp(teacher_logits, temperature, columns) for columns in excluded]
    peaks, totals = (torch.stack(parts) for parts in zip(*local, strict=True))
    merged = merge_log_sum_exp(peaks, totals, group)
    whole, lse = (LogSumExp(*parts) for parts in zip(*merged, strict=True))
    left_out = -torch.expm1((lse.peak - whole.peak).add_(lse.log_sum).sub_(whole.log_sum))
    onto_student = projection.weight.to(left_out.dtype).t()
    width, vocab = projection.weight.shape
    ones = left_out.new_ones(width, 1)
    shares = (projection.weight_transposed.to(left_out.dtype) @ ones)[:, 0]
    shares = all_reduce_sum(shares, group)
    divisor = torch.where(shares > 0, shares, 1.0) if sharing == "split" else None
    out = left_out.new_empty(len(left_out), width)
    gathered = teacher_shard.width * group_size(group)
    for rows in row_slices(len(left_out), gathered, device=left_out.device):
        scaled = scaled_logits(teacher_logits[rows], temperature, excluded[1])
        probs = lse.normalise_(scaled, rows).exp_()
        everywhere = gather_columns(probs, group)[:, :vocab]
        out[rows] = (everywhere if divisor is None else everywhere / divisor) @ onto_student
    is_empty = lse.log_sum.isneginf() & ~whole.log_sum.isneginf()
    return CarriedTargets(out.log_(), left_out, is_empty)

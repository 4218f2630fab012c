"""A teacher's distribution on the student's vocabulary. C rows, Vps Vpt local columns."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import all_reduce_sum, gather_columns, group_size
from megatron_ext.distributed.vocab_parallel import VocabShard, log_softmax
from megatron_ext.losses.inputs.projection_shard import ProjectionShard

Sharing = Literal["split", "copy"]


class CarriedTargets(NamedTuple):
    """Without a graph."""

    log_probs: torch.Tensor
    """[C, Vps] fp32 (fp64 for fp64 logits): logarithms, not normalised; -inf without mass."""

    offsupport_mass: torch.Tensor
    """[C]: the teacher's mass on tokens that no student token maps to."""


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

    Collectives: four all-reduces, of [C, 1] twice, [Vt] and [C], and one all-gather of [C', Vt] a
    slice of C' rows.
    """
    group = teacher_shard.group
    probs = log_softmax(teacher_logits, teacher_shard, temperature=temperature).exp_()
    onto_student = projection.weight.to(probs.dtype).t()
    vocab = projection.weight.shape[1]
    ones = torch.ones(projection.weight.shape[0], 1, dtype=probs.dtype, device=probs.device)
    shares = (projection.weight_transposed.to(probs.dtype) @ ones)[:, 0]
    shares = all_reduce_sum(shares, group)
    divisor = torch.where(shares > 0, shares, 1.0) if sharing == "split" else None
    reached = probs[:, : len(projection.reachable)].masked_fill(~projection.reachable, 0.0)
    mass = all_reduce_sum(reached.sum(dim=-1), group)
    out = probs.new_empty(probs.shape[0], projection.weight.shape[0])
    for rows in row_slices(probs.shape[0], probs.shape[1] * group_size(group), device=probs.device):
        whole = gather_columns(probs[rows], group)[:, :vocab]
        out[rows] = (whole if divisor is None else whole / divisor) @ onto_student
    return CarriedTargets(out.log_(), 1 - mass)

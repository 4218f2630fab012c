"""Teacher targets of the kind ``topk`` from logits. B batch, Tt tokens, Vp local columns."""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.inputs.targets import TeacherTargets
from megatron_ext.ops.implementation import Implementation
from megatron_ext.ops.top_log_probs import top_log_probs


def topk_targets(
    logits: torch.Tensor, k: int, shard: VocabShard, *, implementation: Implementation = "auto"
) -> TeacherTargets:
    """The ``k`` most probable tokens of each position, with what normalises all.

    ``topk_logits`` are over the row's largest, which changes no probability and keeps
    ``log_normaliser`` small: the logarithm of a sum, of which fp32 has all digits.

    Args:
        logits: [B, Tt, Vp], this rank's columns, any float dtype.
        shard: Of the teacher's vocabulary.

    Collectives: one all-gather of int64 [B Tt, min(k, Vp) + 1].

    Raises:
        LossError: ``k`` is not between 1 and the vocabulary.
    """
    top = top_log_probs(logits.flatten(0, 1), k, shard, implementation=implementation)
    positions = logits.shape[:2]
    return TeacherTargets(
        kind="topk",
        shard=shard,
        topk_ids=top.token_id.unflatten(0, positions),
        topk_logits=(top.logit - top.normaliser.peak[:, None]).unflatten(0, positions),
        log_normaliser=top.normaliser.log_sum.unflatten(0, positions),
    )

"""Scores of teachers on a text, in units that teachers of any tokenizer share.

A token of one teacher can be three of another's, so per-token means compare segmentations as much
as models. Scores are therefore summed over a teacher's tokens and divided by the bytes of the text.

B batch, Tt tokens, Vp local columns, S samples, P teachers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    VocabShard,
    row_slices,
    scaled_logits,
)
from megatron_ext.errors import LossError
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.losses.vocabulary_match import row_samples
from megatron_ext.ops.softmax_statistics import row_log_sum_exp
from megatron_ext.ops.token_log_prob import token_log_prob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TeacherMeasure = Literal["bits_per_byte", "entropy", "max_prob"]
"""Score of a text of ``n`` bytes, with ``p_t`` the teacher's prediction at token ``t``:

- ``bits_per_byte``: ``sum_t log2 p_t(label) / n``, the negated code length of the text;
- ``entropy``: ``-sum_t H(p_t) / n`` in bits, the negated uncertainty;
- ``max_prob``: ``(prod_t max p_t) ^ (1/n)``, the probability of its first choices, as a mean over
  bytes; geometric so that cutting a certain token in two changes nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherText:
    """One teacher's predictions of one microbatch, and the number of bytes they cover."""

    targets: TeacherTargets

    labels: torch.Tensor
    """[B, Tt] int64: measured tokens; ``IGNORE_INDEX`` where none."""

    byte_counts: torch.Tensor
    """[S] int64: bytes of the measured tokens in each whole sample, also where this rank has only a
    slice of it."""

    cu_seqlens: torch.Tensor | None = None
    """[S + 1] int32 starts of packed samples in this rank's row, and the end; None: a sample a
    row."""

    context_group: ProcessGroup | None = None
    """Ranks that have the other slices of the samples; None: this rank has whole samples."""


def sample_scores(text: TeacherText, measure: TeacherMeasure) -> torch.Tensor:
    """Nats and bytes of each sample [S, 2] fp64, the same on tensor- and context-parallel ranks.

    Nats are ``-log p(label)``, ``H(p)`` or ``-log max p``, summed over the labels.

    Collectives: for ``bits_per_byte`` of logits those of ``token_log_prob``; of ``max_prob`` two
    and of ``entropy`` three all-reduces of [B Tt]; and one of [S] over ``context_group``. None of a
    vocabulary.

    Raises:
        LossError: Targets from which the measure cannot be computed, or labels of other positions.
    """
    if text.labels.shape != text.targets.positions:
        raise LossError(
            "the labels of a teacher's text are not those of its targets",
            got=tuple(text.labels.shape),
            expected=tuple(text.targets.positions),
        )
    nats = _row_nats(text.targets, text.labels.flatten(), measure)
    is_measured = text.labels.flatten() != IGNORE_INDEX
    kept = torch.where(is_measured, nats, 0.0).to(torch.float64)
    samples = row_samples(text.labels, text.cu_seqlens)
    sums = kept.new_zeros(len(text.byte_counts)).index_add_(0, samples, kept)
    sums = all_reduce_sum(sums, text.context_group)
    return torch.stack([sums, text.byte_counts.to(torch.float64)], dim=-1)


def reduce_scores(totals: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Nats and bytes [P, 2] over data-parallel ranks, not context-parallel ones. One all-reduce."""
    return all_reduce_sum(totals, group)


def score(totals: torch.Tensor, measure: TeacherMeasure) -> torch.Tensor:
    """Scores [...] fp64 from nats and bytes [..., 2]; larger is better, -inf without a byte."""
    nats, count = totals.unbind(dim=-1)
    per_byte = nats / count
    value = torch.exp(-per_byte) if measure == "max_prob" else -per_byte / math.log(2)
    return torch.where(count > 0, value, -torch.inf)


def dynamic_weights(totals: torch.Tensor, measure: TeacherMeasure, *, alpha: float) -> torch.Tensor:
    """``softmax(alpha * score)`` [P] fp32 of nats and bytes [P, 2]; a teacher without text has 0.

    With no text at all, teachers weigh the same.
    """
    # Without text the score stays -inf, also at alpha 0.
    value = score(totals, measure)
    has_text = totals[:, 1] > 0
    scaled = torch.where(has_text, alpha * value, -torch.inf)
    weights = torch.softmax(torch.where(has_text.any(), scaled, 0.0), dim=0)
    return weights.to(torch.float32)


def best_teacher(scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Index [S] of the teacher with the fewest bits per byte; the first of equals.

    Args:
        scores: Nats and bytes [S, 2] of each of P teachers.
    """
    return torch.stack([score(part, "bits_per_byte") for part in scores]).argmax(dim=0)


def _row_nats(
    targets: TeacherTargets, labels: torch.Tensor, measure: TeacherMeasure
) -> torch.Tensor:
    """[B Tt]"""
    if measure == "bits_per_byte" and targets.label_log_probs is not None:
        return -targets.label_log_probs.flatten()
    if measure == "max_prob" and targets.kind == "topk":
        assert targets.topk_logits is not None
        assert targets.log_normaliser is not None
        return (targets.log_normaliser - targets.topk_logits.amax(dim=-1)).flatten()
    if targets.kind not in ("logits", "hidden"):
        raise LossError(
            f"teachers cannot be compared by {measure} from these targets",
            got=f"kind {targets.kind!r}",
            expected="kind 'logits' or 'hidden'"
            + (", or label_log_probs" if measure == "bits_per_byte" else ""),
        )
    logits = targets.to_logits().detach().flatten(0, 1)
    if measure == "bits_per_byte":
        return -token_log_prob(logits, labels, targets.shard)
    return _confidence_nats(logits, targets.shard, is_entropy=measure == "entropy")


def _confidence_nats(logits: torch.Tensor, shard: VocabShard, *, is_entropy: bool) -> torch.Tensor:
    """Entropy or ``-log max p`` [T] of logits [T, Vp]."""
    lse = row_log_sum_exp(logits, shard)
    if not is_entropy:
        # The largest logit is the peak.
        return lse.log_sum
    entropy = torch.empty_like(lse.peak)
    excluded = shard.excluded_columns(logits.device)
    for part in row_slices(*logits.shape, device=logits.device):
        log_p = lse.normalise_(scaled_logits(logits[part], 1.0, excluded), part)
        p = log_p.exp()
        entropy[part] = -(p * log_p.masked_fill_(p == 0, 0.0)).sum(dim=-1)
    return all_reduce_sum(entropy, shard.group)

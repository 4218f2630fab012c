"""Log-probability of one token a row, and cross-entropy with its gradient.

T rows, Vp local columns. Equations are in ``ops/README.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    merge_log_sum_exp,
)
from megatron_ext.ops.chunk_rows import ExpSums, merge_top_columns
from megatron_ext.ops.labels import label_losses, label_rows
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.softmax_statistics import row_statistics
from megatron_ext.ops.token_likelihood import RowGradient, write_token_gradient
from megatron_ext.ops.unit_gradient import kept_gradient


class CrossEntropy(NamedTuple):
    """Cross-entropy of each row [T], replicated over the group."""

    row_loss: torch.Tensor
    """-log p(label) in nats, fp32 (fp64 for fp64 logits); 0 where there is no label or the row has
    the scale 0, NaN for a label beyond the vocabulary."""

    top_column: torch.Tensor
    """int64: global column of the largest logit, the first of equals."""

    log_sum: torch.Tensor
    """Logarithm of the row's sum, NaN where a row that is read has NaN or +inf."""


def evaluate_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    grad_scale: torch.Tensor | float = 1.0,
    gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> CrossEntropy:
    """Compute the cross-entropy of each row, and write its gradient into the caller's memory.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns.
        labels: int64 [T]; a negative one is none.
        grad_scale: [T], the gradient that each ``row_loss`` will get, or that of all. Rows without
            a label or at 0 are not read.
        gradient: [T, Vp] of the logits' dtype, or the logits themselves; d(grad_scale . row_loss) /
            d logits is written to it, with exactly 0 in rows that are not read and in padding.

    Collectives: two all-reduces of [2 T] and one of [T], 24 T bytes in fp32 and int64. Bytes of a
    row of Vp logits of b bytes by kernel: b Vp, with a gradient 3 b Vp.
    """
    by, rows = implementation, len(logits)
    peak, total = logits.new_empty(2, 2 * rows, dtype=accumulation_dtype(logits.dtype))
    local, token_sums = ExpSums(peak[:rows], total[:rows]), ExpSums(peak[rows:], total[rows:])
    # The gradient of a log-probability is that of its loss, negated.
    own = label_rows(
        logits, labels, shard, -grad_scale, token_sums, temperature=temperature, implementation=by
    )
    statistics = row_statistics(
        logits, shard, temperature=temperature, read=own.read, into=local, implementation=by
    )
    merged = merge_log_sum_exp(peak, total, shard.group)
    whole, token = (
        LogSumExp(*(part[place] for part in merged))
        for place in (slice(0, rows), slice(rows, None))
    )
    (top_column,) = merge_top_columns([statistics.column], [local], [whole], [shard])
    row_loss = label_losses(token, whole, labels, own.read, shard, implementation=by)
    if gradient is not None:
        arrives = RowGradient(own.column, own.weight, whole)
        write_token_gradient(
            logits.detach(),
            None,
            arrives,
            shard,
            gradient,
            temperature=temperature,
            implementation=implementation,
        )
    return CrossEntropy(row_loss, top_column, whole.log_sum)


class TokenPrediction(NamedTuple):
    """Log-probability of each row's token [T], replicated over the group."""

    log_prob: torch.Tensor
    """log p of the row's token, with a graph."""

    top_column: torch.Tensor
    """int64: global column of the largest logit, the first of equals; arbitrary for a row
    without a token."""


def token_log_prob(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``log_softmax(logits / temperature)[t, token_id[t]]``, replicated over the group.

    As ``token_prediction``, of which it is the first field: [T] fp32 (fp64 for fp64 logits).
    """
    return token_prediction(
        logits,
        token_id,
        shard,
        temperature=temperature,
        grad_scale=grad_scale,
        in_place=in_place,
        implementation=implementation,
    ).log_prob


def token_prediction(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> TokenPrediction:
    """Log-probabilities of tokens, and the most probable token of each row.

    Args:
        logits: [T, Vp], any float dtype.
        token_id: int64 [T]. A negative id gives 0 without a gradient; an id at or beyond the
            vocabulary gives NaN, since raising an error would have to wait for the device. A row
            without an upstream gradient gets none, whatever it holds.
        grad_scale: [T], the gradient that each log-probability will get; None: 1. Another
            upstream gradient costs a pass over the gradient; but a row of scale 0 has the
            log-probability 0 and never a gradient.
        in_place: Overwrite the logits with their gradient, if they need one.

    Collectives: forward two all-reduces of [2 T] and one of [T], backward none. Keeps the gradient,
    in the logits' dtype, and no logits.

    Raises:
        LossError: The implementation is unknown or cannot run here.
    """
    check_implementation("token_log_prob", implementation)

    def evaluate(
        rows: torch.Tensor, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = evaluate_cross_entropy(
            rows,
            token_id,
            shard,
            temperature=temperature,
            # The loss is the negative log-probability.
            grad_scale=-1.0 if grad_scale is None else -grad_scale,
            gradient=gradient,
            implementation=implementation,
        )
        return -out.row_loss, out.top_column

    values = kept_gradient(
        logits, evaluate, grad_scale=grad_scale, in_place=in_place, implementation=implementation
    )
    return TokenPrediction(*values)


def token_log_prob_reference(
    logits: torch.Tensor, token_id: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """``log_softmax(logits / temperature)[t, token_id[t]]`` [T], 0 where the id is negative."""
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    picked = log_probs.gather(-1, token_id.clamp(min=0)[:, None])[:, 0]
    return torch.where(token_id >= 0, picked, 0.0)

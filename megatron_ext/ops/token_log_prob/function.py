"""Log-probability of given tokens over vocabulary shards. T rows, Vp local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.implementation import Implementation, check_implementation
from megatron_ext.ops.token_log_prob.evaluation import evaluate_cross_entropy
from megatron_ext.ops.unit_gradient import kept_gradient


class TokenPrediction(NamedTuple):
    """What is known of each row [T], replicated over the group."""

    log_prob: torch.Tensor
    """log p of the row's token, with a graph."""

    top_column: torch.Tensor
    """int64: global column of the largest logit, the first of equals; of no meaning for a row
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
    """Log-probabilities of tokens, and what is most probable instead.

    Args:
        logits: [T, Vp], any float dtype.
        token_id: int64 [T]. A negative id gives 0 without a gradient; an id at or beyond the
            vocabulary gives NaN, since to raise the host would have to wait for the device. A row
            that gets no gradient gives none, whatever it holds.
        grad_scale: [T], the gradient that each log-probability will get; None: 1. Any other is
            right as well, at the price of a pass over the gradient; but a row of scale 0 has the
            log-probability 0, and no gradient whatever it gets.
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
            # The loss is the negative of what is asked for.
            grad_scale=-(torch.ones_like(token_id) if grad_scale is None else grad_scale),
            gradient=gradient,
            implementation=implementation,
        )
        return -out.row_loss, out.top_column

    values = kept_gradient(
        logits, evaluate, grad_scale=grad_scale, in_place=in_place, implementation=implementation
    )
    return TokenPrediction(*values)

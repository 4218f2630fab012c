"""Likelihoods of tokens and of sets of tokens, straight from the definition. T rows, V columns."""

from __future__ import annotations

import torch


def token_likelihood_reference(
    logits: torch.Tensor, token_id: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of ``token_id`` [T], 0 where it is negative, and log p of ``members`` [T] bool [V]."""
    log_probs = torch.log_softmax(logits, dim=-1)
    picked = log_probs.gather(-1, token_id.clamp(min=0)[:, None])[:, 0]
    return torch.where(token_id >= 0, picked, 0.0), torch.logsumexp(log_probs[:, members], dim=-1)

"""Log-probability of given tokens, straight from the definition. T rows, V columns."""

from __future__ import annotations

import torch


def token_log_prob_reference(
    logits: torch.Tensor, token_id: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """``log_softmax(logits / temperature)[t, token_id[t]]`` [T], 0 where the id is negative."""
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    picked = log_probs.gather(-1, token_id.clamp(min=0)[:, None])[:, 0]
    return torch.where(token_id >= 0, picked, 0.0)

"""Log-probabilities of selected tokens and of the rest, straight from the definition."""

from __future__ import annotations

import torch


def selected_log_prob_reference(
    logits: torch.Tensor, token_id: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """[T, K + 1] of logits [T, V] and ids [T, K], a negative id being no token."""
    probs = torch.softmax(logits / temperature, dim=-1)
    is_selected = torch.zeros_like(probs, dtype=torch.bool)
    for row, ids in enumerate(token_id):
        is_selected[row, ids[ids >= 0]] = True
    picked = probs.gather(-1, token_id.clamp(min=0))
    rest = torch.where(is_selected, 0.0, probs).sum(dim=-1, keepdim=True)
    return torch.cat([torch.where(token_id >= 0, picked, 0.0), rest], dim=-1).log()

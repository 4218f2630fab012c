"""Largest log-probabilities straight from their definition. T rows, V columns."""

from __future__ import annotations

import torch


def top_log_probs_reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [T, k] of the largest logits, of equals the first, and their log-probabilities."""
    columns = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, :k]
    return columns, torch.log_softmax(logits, dim=-1).gather(-1, columns)

"""Chunk means, straight from the definition. T rows, V columns, C chunks."""

from __future__ import annotations

import torch


def chunk_mean_softmax_reference(
    logits: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int, *, temperature: float = 1.0
) -> torch.Tensor:
    """Mean of ``softmax(logits / temperature)`` over the rows of each chunk: [C, V]."""
    probs = torch.softmax(logits / temperature, dim=-1)
    means = [probs[chunk_id == chunk].mean(dim=0) for chunk in range(chunk_count)]
    return torch.stack(means) if means else probs[:0]

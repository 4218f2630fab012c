"""Embeddings times the square root of their width, as Gemma has them."""

from __future__ import annotations

import torch


def scale_embeddings(embedding: torch.nn.Module) -> None:
    """Have what a ``LanguageModelEmbedding`` returns, [T, B, D], be multiplied by ``sqrt(D)``.

    The factor is rounded to the dtype of the embeddings first, which is how such models were
    trained. A tied head is not scaled.
    """

    def scaled(_: torch.nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        factor = torch.tensor(embeddings.shape[-1] ** 0.5, dtype=embeddings.dtype)
        # A number on the host: nothing waits for the device.
        return embeddings * factor.item()

    embedding.register_forward_hook(scaled)

"""torch's norms in megatron-core's layers, sequence-parallel ones included."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class TorchNorm:
    """Builds ``torch.nn.RMSNorm`` or ``LayerNorm`` of a width, as a layer spec asks for it.

    megatron-core 0.16 refuses its own wrapper of these under sequence parallelism. A norm treats
    every position alone, so all that is missing is the mark by which ``finalize_model_grads`` finds
    the parameters whose gradients are of a part of the sequence on each rank.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

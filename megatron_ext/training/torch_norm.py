"""torch's norms in megatron-core's layers, sequence-parallel ones included."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional


class TorchNorm:
    """Builds ``torch.nn.RMSNorm`` or ``LayerNorm`` of a width, as a layer spec asks for it.

    megatron-core 0.16 refuses its own wrapper of these under sequence parallelism. A norm treats
    every position alone, so all that is missing is the mark by which ``finalize_model_grads`` finds
    the parameters whose gradients are of a part of the sequence on each rank.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        kind: type[torch.nn.Module] = torch.nn.LayerNorm
        if config.normalization == "RMSNorm":
            is_zero_centered = config.layernorm_zero_centered_gamma
            kind = ZeroCenteredNorm if is_zero_centered else torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """``x / rms(x) * (1 + weight)``, in fp32 whatever the dtypes are; Gemma's."""

    def reset_parameters(self) -> None:
        """Weights of zero leave what is normalised as it is."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape and dtype of ``x``."""
        weight = 1.0 + self.weight.float()
        return functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)

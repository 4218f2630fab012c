"""The matrix that ends attention or feed-forward, with a norm behind it, as Gemma 3 has them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron_ext.training.torch_norm import TorchNorm


class PostNormLinear(RowParallelLinear):  # type: ignore[misc]
    """``norm(x W^T)``, in a layer spec's place for ``linear_proj`` or ``linear_fc2``.

    The norm is of the residual's width and sees what all tensor-parallel ranks have summed, so
    every rank has all its weights, and the gradient of all of them.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = TorchNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, B, D] and no bias; collectives: those of ``RowParallelLinear``."""
        output, bias = super().forward(x)
        assert bias is None, "these models have no biases"
        return self.post_layernorm(output), None

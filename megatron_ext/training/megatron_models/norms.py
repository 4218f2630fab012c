"""Norms for megatron-core's models: torch's, Gemma's, and OLMo-2's of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from megatron_ext.distributed.shard_collectives import copy_to_shards, sum_over_shards


class TorchNorm:
    """A ``torch.nn.RMSNorm`` or ``LayerNorm``, built with the arguments of a layer spec.

    megatron-core 0.16 refuses its own wrapper of these under sequence parallelism. A norm treats
    every position separately, so it only needs the mark by which ``finalize_model_grads`` finds
    parameters whose gradients cover a part of the sequence on each rank.
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
        """Set the weights to zero, which is the identity after normalisation."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x``; the result has its shape and dtype."""
        weight = 1.0 + self.weight.float()
        return functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


class HeadsNorm(torch.nn.Module):
    """``x / rms(x) * weight`` over all heads of a position together, in fp32; OLMo-2's.

    The heads of a position are on several tensor-parallel ranks. Every rank has all weights and
    uses those of its own heads, so that their gradients are summed over the ranks, as
    megatron-core does for norms of queries and keys.

    Collectives: one all-reduce forward and one backward, [T, B, 1, 1] over the tensor-parallel
    group, where it has several ranks.

    Args:
        config: Of the model.
        hidden_size: Width D of a head.
        eps: Added to the mean square.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(self._heads(config) * hidden_size))
        self._eps = eps
        self._group = parallel_state.get_tensor_model_parallel_group()

    def _heads(self, config: TransformerConfig) -> int:
        return int(config.num_attention_heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the heads of this rank, [T, B, N, D]; the result has their shape and dtype."""
        heads, width = x.shape[-2:]
        numbers = x.float()
        squares = numbers.square().sum((-2, -1), keepdim=True)
        if self._group.size() > 1:
            # Every rank's output depends on the sum, so that its gradient is a sum, too.
            squares = copy_to_shards(sum_over_shards(squares, self._group), self._group)
        first = heads * self._group.rank()
        weight = self.weight.float().view(-1, width)[first : first + heads]
        scale = (squares / self.weight.numel() + self._eps).rsqrt()
        return (numbers * scale * weight).type_as(x)


class KeyHeadsNorm(HeadsNorm):
    """``HeadsNorm`` of keys, of which grouped-query attention has fewer."""

    def _heads(self, config: TransformerConfig) -> int:
        return int(config.num_query_groups or config.num_attention_heads)

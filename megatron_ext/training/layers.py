"""torch's norms in megatron-core's layers, sequence-parallel ones included.

Attention of Gemma 3's layers: those that see a window rotate by a base of their own.

The matrix that ends attention or feed-forward, with a norm behind it, as Gemma 3 has them.

Embeddings times the square root of their width, as Gemma has them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
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


class WindowAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's attention; in all layers but every n-th with rotary embeddings of its own.

    The window itself is not cut: sequences are no longer than it, which the configuration checks.

    Args:
        config: Of the model.
        submodules: Of the spec.
        layer_number: From 1, over all stages.
        local_rotary_base: Base of the layers with a window.
        full_attention_interval: n
        options: What the spec and megatron-core give besides.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        local_rotary_base: int,
        full_attention_interval: int,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, **options)
        self.local_rotary: RotaryEmbedding | None = None
        if layer_number % full_attention_interval:
            self.local_rotary = RotaryEmbedding(
                kv_channels=config.kv_channels,
                rotary_percent=1.0,
                rotary_base=local_rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As ``SelfAttention``, whose rotary embeddings [T, 1, 1, width] are the other layers'."""
        if self.local_rotary is not None and rotary_pos_emb is not None:
            rotary_pos_emb = self.local_rotary(rotary_pos_emb.shape[0])
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **options
        )


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

"""Attention of Gemma 3's layers: those that see a window rotate by a base of their own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules


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

"""Transformer Engine's attention, for rows of one text and of several."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention

from megatron_ext.training.megatron_models.attention import ContextAttention


class RowAttention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention without a mask, ``ContextAttention`` with one.

    Rows of several texts come with a mask that keeps them apart. Transformer Engine's causal
    attention reads none, and takes no other over context-parallel ranks; nor has it windows there.

    Args:
        options: Arguments of a layer spec's core attention.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._masked = ContextAttention(**options)
        is_shared = self._masked.config.context_parallel_size > 1
        self._is_masked = is_shared and self._masked.window is not None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """[S, B, H D]; see ``ContextAttention``."""
        is_masked = self._is_masked or attention_mask is not None
        attend = self._masked if is_masked else super().forward
        out: torch.Tensor = attend(query, key, value, attention_mask, **options)
        return out

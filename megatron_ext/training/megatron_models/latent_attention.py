"""Latent attention (MLA): megatron-core's, with narrow products that all ranks have.

T positions, B rows, D hidden, R width of the narrow product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.training.megatron_models.layers import divide_frequencies
from megatron_ext.training.megatron_models.megatron_parts import needed
from megatron_ext.training.megatron_models.norms import TorchNorm

EPSILON: Final = 1e-6
"""That of the norms of narrow products in all published models, whatever their other norms have."""


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """``MLASelfAttention`` with ``SharedLinear`` as the first products, norms of torch, and YaRN.

    megatron-core's own cuts the first products over tensor-parallel ranks without Transformer
    Engine, and then loses the sum over heads of the gradient of what all heads' keys share.

    Args:
        config: Configuration of the model.
        submodules: Submodules of the spec.
        layer_number: From 1, over all stages.
        rotary_divisors: Divisors of the frequencies of the rotary embeddings; None for 1.
        options: Other arguments of ``MLASelfAttention``.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        *,
        rotary_divisors: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        with needed("has_te_for_latent").replaced(lambda _: False):
            super().__init__(config, submodules, layer_number, **options)
        group, keys = self.pg_collection.tp, config.kv_lora_rank
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = SharedLinear(config, config.q_lora_rank, group=group)
            self.q_layernorm = TorchNorm(config, config.q_lora_rank, eps=EPSILON)
        rotated = config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = SharedLinear(
            config, keys + rotated, of_heads=rotated, group=group
        )
        self.kv_layernorm = TorchNorm(config, keys, eps=EPSILON)
        if rotary_divisors is not None:
            divide_frequencies(self.rotary_pos_emb, int(config.rotary_base), rotary_divisors)


class SharedLinear(torch.nn.Module):
    """``x W^T`` with all of ``W`` on every tensor-parallel rank.

    Under sequence parallelism a rank has a part of the positions, and of the gradient of ``W``,
    which ``finalize_model_grads`` sums. Otherwise every rank has the whole gradient.

    Collectives: without sequence parallelism backward one all-reduce, of [T, B, of_heads].

    Args:
        config: Configuration of the model.
        output_size: R
        of_heads: Last numbers of the output that each rank uses for its own heads alone, so that
            their gradient is a sum over ranks; that of the others is whole on every rank.
        group: Tensor-parallel group.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        output_size: int,
        *,
        of_heads: int = 0,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__()
        shape = (output_size, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        assert config.init_method is not None, "set by megatron-core"
        with torch.no_grad():
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._group = group
        self._summed = 0 if config.sequence_parallel or group.size() == 1 else of_heads

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[T, B, R] of [T, B, D], and no bias."""
        output = functional.linear(x, self.weight)
        if self._summed:
            whole, of_heads = output.split((output.shape[-1] - self._summed, self._summed), -1)
            output = torch.cat((whole, copy_to_shards(of_heads, self._group)), dim=-1)
        return output, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weights for ``dist_checkpointing``, whole on every rank."""
        state = self.state_dict(prefix="", keep_vars=True)
        whole: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets
        )
        return whole

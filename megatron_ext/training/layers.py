"""Layers for megatron-core's models: torch's norms, those of Gemma, and places for adapters."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional


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


class WindowAttention(SelfAttention):  # type: ignore[misc]
    """Attention of Gemma 3, with rotary embeddings of its own in all layers but every n-th.

    The window itself is not applied: sequences are no longer, which the configuration checks.

    Args:
        config: Configuration of the model.
        submodules: Submodules of the spec.
        layer_number: From 1, over all stages.
        local_rotary_base: Base of the layers with a window.
        full_attention_interval: n
        options: Other arguments of ``SelfAttention``.
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
        """Attend as ``SelfAttention``, with ``rotary_pos_emb`` [T, 1, 1, width] of full layers."""
        if self.local_rotary is not None and rotary_pos_emb is not None:
            rotary_pos_emb = self.local_rotary(rotary_pos_emb.shape[0])
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **options
        )


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's column-parallel layer, with a place for an adapter of ``learning_parts``."""

    def __init__(self, *args: Any, tp_comm_buffer_name: str | None = None, **options: Any) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **options)
        self.register_module("lora", None)
        self._is_gated = bool(self.config.gated_linear_unit) and tp_comm_buffer_name == "fc1"

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        """[T, B, out] on this rank, and the bias; collectives: those of both parts."""
        output, bias = super().forward(x, *args, **options)
        return output if self.lora is None else output + self.lora(x), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weights for ``dist_checkpointing``, those of an adapter cut as the layer is."""
        state = _sharded(self, {"weight": 0, "bias": 0, "lora.b": 0}, prefix, sharded_offsets)
        if self.lora is not None and self._is_gated:
            # Rows of a gate and those that it opens are cut apart, as megatron-core's MLP does.
            name = f"{prefix}lora.b"
            state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """megatron-core's row-parallel layer, with a place for an adapter of ``learning_parts``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_module("lora", None)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """[T, B, out], and the bias; collectives: those of both parts."""
        output, bias = super().forward(x)
        return output if self.lora is None else output + self.lora(x), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weights for ``dist_checkpointing``, those of an adapter cut as the layer is."""
        return _sharded(self, {"weight": 1, "lora.a": 1}, prefix, sharded_offsets)


def _sharded(
    linear: ColumnLinear | RowLinear, axes: dict[str, int], prefix: str, offsets: Any
) -> dict[str, Any]:
    """A linear layer's tensors, each cut along its axis or whole on every rank."""
    state = linear.state_dict(prefix="", keep_vars=True)
    sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, axes, offsets)
    return sharded


class PostNormLinear(RowLinear):
    """``norm(x W^T)``, in a layer spec's place for ``linear_proj`` or ``linear_fc2``.

    Gemma 3 has such norms behind attention and feed-forward. The norm is applied after the sum over
    tensor-parallel ranks, so every rank has all its weights and their whole gradient.
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
    """Multiply a ``LanguageModelEmbedding``'s output, [T, B, D], by ``sqrt(D)``, as Gemma does.

    The factor is rounded to the dtype of the embeddings, as in the training of these models. A tied
    head is not scaled.
    """

    def scaled(_: torch.nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        factor = torch.tensor(embeddings.shape[-1] ** 0.5, dtype=embeddings.dtype)
        # A number on the host, so that nothing waits for the device.
        return embeddings * factor.item()

    embedding.register_forward_hook(scaled)

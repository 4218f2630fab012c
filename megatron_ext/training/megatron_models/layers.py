"""Layers for megatron-core's models: what families have beside Llama's, and places for adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.parallel_state import get_data_parallel_group
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_ext.training.megatron_models.norms import TorchNorm

Addition = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]
"""Sum of a layer's output, [T, B, D] with a bias or None, and the residual; the probability of
dropout is 0."""


class WindowAttention(SelfAttention):  # type: ignore[misc]
    """Attention of Gemma 3 and OLMo 3, with rotary embeddings of its own in all layers but every
    n-th.

    The window itself is of the core attention, ``ContextAttention``.

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
            # Of whole sequences, from which it takes the positions of this context-parallel rank.
            length = rotary_pos_emb.shape[0] * self.config.context_parallel_size
            rotary_pos_emb = self.local_rotary(length)
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
        axes = {"weight": 0, "bias": 0, "lora.b": 0}
        state = _sharded(self, axes, prefix, sharded_offsets)
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
    sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        linear.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        # That of experts is another than the model's.
        tp_group=linear.tp_group,
        dp_cp_group=get_data_parallel_group(with_context_parallel=True),
    )
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


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """``x sigmoid(1.702 x)``; that of megatron-core is compiled where it is first called."""
    return x * torch.sigmoid(1.702 * x)


def magnify(norm: torch.nn.Module, width: int, factor: float) -> None:
    """Have a norm of queries or keys multiply the first ``width`` numbers of each head by
    ``factor`` at last.

    LongRoPE and YaRN multiply sines and cosines instead, in which the rotation is linear.
    """

    def multiply(module: torch.nn.Module, arguments: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[..., :width] * factor, x[..., width:]), dim=-1)

    norm.register_forward_hook(multiply)


def divide_frequencies(rotary: RotaryEmbedding, base: int, divisors: Sequence[float]) -> None:
    """Set ``1 / (divisor_i base^(i / n))`` as the ``n`` frequencies of rotary embeddings."""
    count, like = len(divisors), rotary.inv_freq
    powers = base ** (torch.arange(count, dtype=like.dtype, device=like.device) / count)
    rotary.inv_freq = 1.0 / (torch.tensor(divisors, dtype=like.dtype, device=like.device) * powers)


def scaled_addition(factor: float) -> Callable[[bool, bool], Addition]:
    """``residual + factor * output``, in a layer spec's place for ``get_bias_dropout_add``.

    Granite's; equivalent to its ``residual + hidden_states * residual_multiplier``.
    """

    def add(
        output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float
    ) -> torch.Tensor:
        return residual + _with_bias(output) * factor

    def addition(is_training: bool, is_fused: bool) -> Addition:
        del is_training, is_fused
        return add

    return addition


class ParallelLayer(TransformerLayer):  # type: ignore[misc]
    """``x + attention(norm_1(x)) + mlp(norm_2(x))``; GPT-NeoX's.

    The output of attention is kept until that of the feed-forward layer is there, and the sum is
    taken in the order of transformers.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        kept: list[torch.Tensor] = []

        def keep(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float
        ) -> torch.Tensor:
            kept[:] = [_with_bias(output)]
            return residual

        def add(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float
        ) -> torch.Tensor:
            return _with_bias(output) + kept.pop() + residual

        self.self_attn_bda = lambda *_: keep
        self.mlp_bda = lambda *_: add


def _with_bias(output: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    x, bias = output
    return x if bias is None else x + bias


def scale_embeddings(embedding: torch.nn.Module, factor: float) -> None:
    """Multiply a ``LanguageModelEmbedding``'s output, [T, B, D], but not a head that is tied."""

    def scaled(_: torch.nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings * factor

    embedding.register_forward_hook(scaled)


def cap_logits(output_layer: torch.nn.Module, cap: float) -> None:
    """Have an output layer give ``cap tanh(logits / cap)``, [T, B, Vp]; Gemma 2's."""

    def capped(_: torch.nn.Module, inputs: object, output: Any) -> Any:
        logits, bias = output
        return torch.tanh(logits / cap) * cap, bias

    output_layer.register_forward_hook(capped)


def scale_logits(final_norm: torch.nn.Module, divisor: float) -> None:
    """Divide what the head reads, [T, B, D], and so the logits, which are linear in it.

    Losses that work from hidden states and a head need to know nothing of it.
    """

    def scaled(_: torch.nn.Module, inputs: object, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / divisor

    final_norm.register_forward_hook(scaled)

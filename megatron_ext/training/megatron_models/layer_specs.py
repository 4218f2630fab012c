"""Specs of the layers of a model, Transformer Engine's or torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import HAVE_TE, TransformerBlockSubmodules

from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.attention import ContextAttention
from megatron_ext.training.megatron_models.experts import ExpertRowLinear, Experts, Router
from megatron_ext.training.megatron_models.gated_delta_net import GatedDeltaNet
from megatron_ext.training.megatron_models.latent_attention import LatentAttention
from megatron_ext.training.megatron_models.layers import (
    ColumnLinear,
    ParallelLayer,
    PostNormLinear,
    RowLinear,
    WindowAttention,
    scaled_addition,
)
from megatron_ext.training.megatron_models.megatron_parts import MLP_SUBMODULES, of_release
from megatron_ext.training.megatron_models.norms import HeadsNorm, KeyHeadsNorm, TorchNorm


def layer_spec(
    model: ModelConfig, parallel: ParallelConfig, *, stage: int, has_adapters: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers where it is installed and supports the model, else torch's.

    The local spec names the final norm too: otherwise megatron-core takes it from whichever of
    Transformer Engine and Apex imports, and neither fits these layers. ``TorchNorm`` supports
    sequence parallelism, and ``ContextAttention`` context parallelism, which megatron-core's own
    norms and attention refuse; its attention would also keep the scores of every layer.

    Args:
        stage: Number of the chunk over all ranks of the pipeline.
    """
    core_attention: Callable[..., Any] = ContextAttention
    if model.attention_cap is not None:
        core_attention = partial(ContextAttention, score_cap=model.attention_cap)
    if has_te():
        from megatron_ext.training.megatron_models.te_attention import RowAttention

        if not (has_own_layers(model) or has_adapters):
            layer = get_gpt_layer_with_transformer_engine_spec(
                num_experts=model.num_experts,
                moe_grouped_gemm=model.num_experts is not None,
                qk_layernorm=model.qk_layernorm,
            )
            layer.submodules.self_attention.submodules.core_attention = RowAttention
            if model.num_experts is not None:
                _route(layer, model)
            _have_places_of_norms(layer, model)
            _add_residuals(layer, model)
            return layer
        if has_adapters and not model.attention_sinks and model.attention_cap is None:
            core_attention = RowAttention
    count = model.num_layers // (
        parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    )
    first = stage * count
    layers = [
        _local_layer(
            model,
            core_attention,
            has_experts=model.num_experts is not None and layer >= model.moe_first_dense_layers,
            is_linear=model.has_linear_attention(layer + 1),
        )
        for layer in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)


def _local_layer(
    model: ModelConfig, core_attention: Callable[..., Any], *, has_experts: bool, is_linear: bool
) -> ModuleSpec:
    """A layer of torch's products and norms, and of ours."""
    layer = get_gpt_layer_local_spec(
        num_experts=model.num_experts if has_experts else None,
        normalization=model.normalization,
        multi_latent_attention=model.is_latent,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    attention = layer.submodules.self_attention.submodules
    mlp = of_release(MLP_SUBMODULES)(layer.submodules.mlp)
    if not model.pre_layernorms:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    if model.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    if model.qk_layernorm_over == "heads":
        attention.q_layernorm, attention.k_layernorm = HeadsNorm, KeyHeadsNorm
    attention.core_attention, attention.linear_proj = core_attention, RowLinear
    if model.is_latent:
        _make_latent(layer, model)
    else:
        attention.linear_qkv = ColumnLinear
    if has_experts:
        _have_experts(layer, model)
    else:
        mlp.linear_fc1, mlp.linear_fc2 = ColumnLinear, RowLinear
    if model.post_layernorms:
        attention.linear_proj = mlp.linear_fc2 = PostNormLinear
    if model.local_rotary_base is not None:
        _rotate_by_kind(layer, model)
    _have_places_of_norms(layer, model)
    _add_residuals(layer, model)
    if is_linear:
        layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet)
    return layer


def _make_latent(layer: ModuleSpec, model: ModelConfig) -> None:
    """Give a layer our form of latent attention."""
    attention = layer.submodules.self_attention
    parts = attention.submodules
    attention.module = LatentAttention
    attention.params = {**attention.params, "rotary_divisors": model.rotary_divisors}
    parts.linear_q_proj = parts.linear_q_up_proj = parts.linear_kv_up_proj = ColumnLinear


def _have_experts(layer: ModuleSpec, model: ModelConfig) -> None:
    """Give a layer of experts our router and experts."""
    _route(layer, model)
    mlp = of_release(MLP_SUBMODULES)(layer.submodules.mlp)
    if isinstance(mlp.experts, ModuleSpec):
        mlp.experts.module, of_expert = Experts, mlp.experts.submodules
    else:
        of_expert = mlp.experts.keywords["submodules"]
        mlp.experts = partial(Experts, **mlp.experts.keywords)
    of_expert.linear_fc1, of_expert.linear_fc2 = ColumnLinear, ExpertRowLinear
    shared = mlp.shared_experts
    of_shared = (
        shared.submodules if isinstance(shared, ModuleSpec) else shared.keywords["submodules"]
    )
    of_shared.linear_fc1, of_shared.linear_fc2 = ColumnLinear, RowLinear
    # The name that Transformer Engine's layers have in files: no norm belongs to one expert.
    layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)


def has_own_layers(model: ModelConfig) -> bool:
    """Whether a model has parts that Transformer Engine's layers do not have."""
    has_own_norms = model.post_layernorms or model.qk_layernorm_over != "head"
    has_own_experts = model.gate_limit is not None or model.moe_first_dense_layers > 0
    has_own_attention = model.attention_sinks or model.is_latent or model.attention_cap is not None
    has_own_attention |= model.is_hybrid or model.attention_output_gate
    return has_own_norms or has_own_experts or has_own_attention


def _have_places_of_norms(layer: ModuleSpec, model: ModelConfig) -> None:
    """Give queries and keys of a layer without norms their places, which a magnitude is of."""
    if model.rotary_magnitude != 1 and not model.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = IdentityOp


def _add_residuals(layer: ModuleSpec, model: ModelConfig) -> None:
    """Give a layer the model's way of adding to the residual stream."""
    if model.parallel_residual:
        layer.module = ParallelLayer
    elif model.residual_multiplier != 1:
        addition = scaled_addition(model.residual_multiplier)
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = addition


def has_te() -> bool:
    """Whether layers can be Transformer Engine's."""
    return HAVE_TE and not cpu_megatron.is_installed()


def _route(layer: ModuleSpec, model: ModelConfig) -> None:
    """Give a layer of experts our router, in the spec of all layers."""
    of_release(MLP_SUBMODULES)(layer.submodules.mlp).router = partial(
        Router,
        has_bias=model.has_expert_bias,
        bias_update_rate=model.moe_router_bias_update_rate,
    )


def _rotate_by_kind(layer: ModuleSpec, model: ModelConfig) -> None:
    """Give layers with a window rotary embeddings of their own, in the spec of all layers."""
    attention = layer.submodules.self_attention
    attention.module = WindowAttention
    attention.params = {
        **attention.params,
        "local_rotary_base": model.local_rotary_base,
        "full_attention_interval": model.full_attention_interval,
    }

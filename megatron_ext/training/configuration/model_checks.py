"""Checks of parts of a model that do not go together, or that are not whole."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.number_checks import check_divides

if TYPE_CHECKING:
    from megatron_ext.training.configuration.model import ModelConfig


def check_model(model: ModelConfig) -> None:
    """Refuse a model that cannot be.

    Raises:
        ConfigError: Of its first fault.
    """
    _check_experts(model)
    _check_latent(model)
    _check_linear(model)
    if model.kv_channels is None and not model.is_latent:
        check_divides(model, "hidden_size", "num_attention_heads")
    if model.local_rotary_base is not None and model.full_attention_interval is None:
        raise ConfigError(
            "local_rotary_base needs full_attention_interval", got=model.local_rotary_base
        )
    if model.layernorm_zero_centered_gamma and model.normalization != "RMSNorm":
        raise ConfigError(
            "layernorm_zero_centered_gamma is of RMSNorm alone", got=model.normalization
        )
    for name, off in (("gate_activation", "silu"), ("gate_limit", None), ("gated_offset", 0.0)):
        if getattr(model, name) != off and not model.swiglu:
            raise ConfigError(f"{name} needs a gate", got="swiglu false")
    _check_rotation(model)
    _check_layer(model)
    if model.num_query_groups is not None:
        check_divides(model, "num_attention_heads", "num_query_groups")


def _check_rotation(model: ModelConfig) -> None:
    """Refuse rotary embeddings that cannot be."""
    if model.position_embedding_type != "rope":
        return
    if model.rotary_percent > 1:
        raise ConfigError("rotary_percent is a part of 1", got=model.rotary_percent)
    width = model.rotary_width
    if width % 2 or not width:
        raise ConfigError(
            "rotary embeddings need heads of an even width",
            got=f"{width} of {model.head_width} (kv_channels, or hidden_size / "
            "num_attention_heads) by rotary_percent",
            fix="change one of them, or position_embedding_type",
        )
    if model.rotary_longest is not None and model.seq_length > model.rotary_longest:
        raise ConfigError(
            "longer sequences would need the long factors of LongRoPE, dynamic scaling, or queries "
            "that grow (Ministral 3), which are not supported",
            got=f"seq_length {model.seq_length}, rotary_longest {model.rotary_longest}",
            fix="set seq_length to rotary_longest at most",
        )
    divisors = model.rotary_divisors
    if divisors is not None and len(divisors) != width // 2:
        raise ConfigError(
            "rotary_divisors has not a number for each pair that is turned",
            got=len(divisors),
            expected=width // 2,
        )


def _check_layer(model: ModelConfig) -> None:
    """Refuse parts of a layer that do not go together."""
    if model.attention_cap is not None and model.attention_sinks:
        raise ConfigError("attention_cap does not go with attention_sinks", got="both")
    if model.qk_layernorm_over == "heads" and not (
        model.qk_layernorm
        and model.normalization == "RMSNorm"
        and not model.layernorm_zero_centered_gamma
    ):
        raise ConfigError(
            "qk_layernorm_over heads needs qk_layernorm, of RMSNorm with weights from one",
            got=f"qk_layernorm {model.qk_layernorm}, {model.normalization}",
        )
    if model.post_layernorms and (model.add_bias_linear or model.parallel_residual):
        raise ConfigError(
            "layers with post_layernorms have neither biases nor a parallel residual",
            got="add_bias_linear" if model.add_bias_linear else "parallel_residual",
        )
    if not (model.pre_layernorms or model.post_layernorms):
        raise ConfigError(
            "layers without pre_layernorms need post_layernorms", got="pre_layernorms false"
        )
    if model.parallel_residual and model.residual_multiplier != 1:
        raise ConfigError(
            "residual_multiplier is not of a parallel residual", got=model.residual_multiplier
        )
    if model.scale_embeddings and model.embedding_multiplier != 1:
        raise ConfigError(
            "embeddings have one factor: scale_embeddings, or embedding_multiplier", got="both"
        )


def _check_latent(model: ModelConfig) -> None:
    """Refuse latent attention that is not whole, and what does not go with it."""
    sizes = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    if not model.is_latent:
        for name in ("q_lora_rank", *sizes):
            if getattr(model, name) is not None:
                raise ConfigError(f"{name} is of latent attention", fix="set kv_lora_rank")
        return
    for name in sizes:
        if getattr(model, name) is None:
            raise ConfigError(f"latent attention needs {name}", got="none")
    for name, off in (
        ("num_query_groups", (None, model.num_attention_heads)),
        ("kv_channels", (None, model.head_width)),
        ("window_size", (None,)),
        ("unrotated_interval", (None,)),
        ("rotary_magnitude", (1.0,)),
        ("rotary_percent", (1.0,)),
        ("position_embedding_type", ("rope",)),
        ("use_rope_scaling", (False,)),
        ("rotary_seq_len_interpolation_factor", (None,)),
        ("local_rotary_base", (None,)),
        ("attention_cap", (None,)),
        ("normalization", ("RMSNorm",)),
        ("layernorm_zero_centered_gamma", (False,)),
        *((name, (False,)) for name in ("qk_layernorm", "attention_sinks", "add_qkv_bias")),
        *((name, (False,)) for name in ("add_bias_linear", "post_layernorms")),
        ("attention_output_gate", (False,)),
        ("pre_layernorms", (True,)),
    ):
        if getattr(model, name) not in off:
            raise ConfigError(f"latent attention does not go with {name}", got=getattr(model, name))


OF_LINEAR: Final = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Sizes of linear attention."""


def _check_linear(model: ModelConfig) -> None:
    """Refuse linear attention that is not whole, and what does not go with it."""
    given = {name: getattr(model, name) for name in OF_LINEAR}
    if not model.is_hybrid:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is of linear attention", got=value, fix="set linear_attention_freq"
                )
        return
    for name, value in given.items():
        if value is None:
            raise ConfigError(f"linear attention needs {name}", got="none")
    if model.linear_attention_freq == 1:
        raise ConfigError(
            "every layer would have full attention",
            got="linear_attention_freq 1",
            fix="leave it out, or set it to 2 or more",
        )
    check_divides(model, "linear_num_value_heads", "linear_num_key_heads")
    for name, off in (
        ("kv_lora_rank", None),
        ("window_size", None),
        ("unrotated_interval", None),
        ("local_rotary_base", None),
        ("parallel_residual", False),
        ("post_layernorms", False),
        ("add_bias_linear", False),
        ("moe_first_dense_layers", 0),
    ):
        if getattr(model, name) != off:
            raise ConfigError(f"linear attention does not go with {name}", got=getattr(model, name))


def is_of_experts(name: str) -> bool:
    """Whether a setting is of models with experts."""
    return name == "num_experts" or name.startswith("moe_")


def _check_experts(model: ModelConfig) -> None:
    """Refuse settings of experts that contradict each other, or are of a dense model."""
    if model.num_experts is None:
        for field in fields(model):
            value = getattr(model, field.name)
            if is_of_experts(field.name) and value != field.default:
                raise ConfigError(
                    f"{field.name} is of a model with experts",
                    got=f"{value} without num_experts",
                    fix="set num_experts, or leave it out",
                )
        return
    if model.moe_router_topk > model.num_experts:
        raise ConfigError(
            "a token cannot go to more experts than there are",
            got=f"moe_router_topk {model.moe_router_topk} of num_experts {model.num_experts}",
        )
    softmax = model.moe_router_score_function == "softmax"
    if softmax and model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        raise ConfigError(
            "the softmax over a single chosen expert is 1, so that the router would not learn",
            got="moe_router_topk 1",
            fix="set moe_router_pre_softmax",
        )
    if softmax and model.has_expert_bias:
        raise ConfigError(
            "a bias of experts needs sigmoid scores",
            got="moe_router_score_function softmax",
            fix="set it to sigmoid, or balance by moe_aux_loss_coeff",
        )
    if not softmax and model.moe_router_pre_softmax:
        raise ConfigError("moe_router_pre_softmax needs softmax scores", got="sigmoid")
    _check_groups(model)
    if model.moe_first_dense_layers >= model.num_layers:
        raise ConfigError(
            "a model with experts has a layer of them",
            got=f"moe_first_dense_layers {model.moe_first_dense_layers} of {model.num_layers}",
        )
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        raise ConfigError(
            "moe_shared_expert_gate needs moe_shared_expert_intermediate_size", got="none"
        )
    for name in ("post_layernorms", "parallel_residual"):
        if getattr(model, name):
            raise ConfigError(f"layers with {name} have no experts", got=model.num_experts)
    if model.add_bias_linear and model.moe_shared_expert_intermediate_size is not None:
        raise ConfigError("shared experts have no biases", got="add_bias_linear")


def _check_groups(model: ModelConfig) -> None:
    """Refuse groups of experts that cannot be."""
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None or chosen > groups:
        raise ConfigError(
            "groups of experts need moe_router_num_groups, and as many chosen at most",
            got=f"moe_router_num_groups {groups}, moe_router_group_topk {chosen}",
        )
    check_divides(model, "num_experts", "moe_router_num_groups")
    check_divides(model, "moe_router_topk", "moe_router_group_topk")

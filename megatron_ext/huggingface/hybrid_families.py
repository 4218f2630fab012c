"""Families with layers of linear attention among those of full attention: Qwen3-Next, Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.deepseek import NEXT_KEYS
from megatron_ext.huggingface.dense_families import LLAMA
from megatron_ext.huggingface.expert_families import (
    EVERY_LAYER,
    QWEN2_MOE,
    QWEN_EXPERTS,
    SHARED_EXPERT,
)
from megatron_ext.huggingface.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    KEY_NORM,
    MLP_INPUT,
    MLP_NORM,
    MLP_OUTPUT,
    QKV,
    QUERY_NORM,
    Family,
)
from megatron_ext.huggingface.rotary import PART, layer_types
from megatron_ext.huggingface.tensor_map import Order, Part, Rule

_KINDS: Final = "layer_types"
INTERVAL: Final = "full_attention_interval"
"""Keys for the kinds of layers, of which published files have one or both."""

LINEAR_SIZES: Final = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
"""Keys that are settings of the same name."""

_FULL_KIND: Final = "full_attention"
_LINEAR_KIND: Final = "linear_attention"

_LINEAR: Final = "model.layers.{layer}.linear_attn"
_MEGATRON: Final = "decoder.layers.self_attention"


def _linear(megatron: str, *parts: Part, by_head: bool = False) -> Rule:
    """A tensor of linear attention."""
    order: Order = "by_linear_head" if by_head else "stacked"
    return Rule(f"{_MEGATRON}.{megatron}", parts, order=order, layers="linear")


_FULL: Final = (
    Rule(
        QKV.megatron,
        (Part(QKV.parts[0].name, ("gated_query", "hidden")), *QKV.parts[1:]),
        order="gated_by_query_group",
        layers="full",
    ),
    *(
        Rule(rule.megatron, rule.parts, layers="full")
        for rule in (QUERY_NORM, KEY_NORM, ATTENTION_OUTPUT)
    ),
)
_CONVOLUTION: Final = tuple(
    Part(f"{_LINEAR}.conv1d.weight", (size, "one", "linear_convolution"))
    for size in ("linear_key", "linear_key", "linear_value")
)
_BEHIND: Final = (
    _linear("conv_weight", *_CONVOLUTION, by_head=True),
    _linear("A_log", Part(f"{_LINEAR}.A_log", ("linear_value_heads",))),
    _linear("dt_bias", Part(f"{_LINEAR}.dt_bias", ("linear_value_heads",))),
    _linear("out_norm.weight", Part(f"{_LINEAR}.norm.weight", ("linear_value_head",))),
    _linear("out_proj.weight", Part(f"{_LINEAR}.out_proj.weight", ("hidden", "linear_value"))),
)
_QWEN3_NEXT: Final = (
    _linear(
        "in_proj.weight",
        Part(f"{_LINEAR}.in_proj_qkvz.weight", ("linear_mixed", "hidden")),
        Part(f"{_LINEAR}.in_proj_ba.weight", ("linear_gates", "hidden")),
        by_head=True,
    ),
    *_BEHIND,
)
_QWEN3_5: Final = (
    _linear(
        "in_proj.weight",
        Part(f"{_LINEAR}.in_proj_qkv.weight", ("linear_key", "hidden")),
        Part(f"{_LINEAR}.in_proj_qkv.weight", ("linear_key", "hidden")),
        Part(f"{_LINEAR}.in_proj_qkv.weight", ("linear_value", "hidden")),
        Part(f"{_LINEAR}.in_proj_z.weight", ("linear_value", "hidden")),
        Part(f"{_LINEAR}.in_proj_b.weight", ("linear_value_heads", "hidden")),
        Part(f"{_LINEAR}.in_proj_a.weight", ("linear_value_heads", "hidden")),
        by_head=True,
    ),
    *_BEHIND,
)

_SETTINGS: Final[Mapping[str, Any]] = {
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    **LLAMA.defaults,
    PART: 0.25,
    "head_dim": 256,
    INTERVAL: 4,
    NEXT_KEYS[1]: 0,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_ALLOWED: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
}

QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    models="Qwen3.5, dense, text",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        *_FULL,
        *_QWEN3_5,
        MLP_NORM,
        MLP_INPUT,
        MLP_OUTPUT,
        FINAL_NORM,
        HEAD,
    ),
    settings=_SETTINGS,
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    allowed=_ALLOWED,
)

_ENTRY: Final = "model.layers.{layer}.mlp.experts"
_ENTRIES: Final = (
    Rule(
        QWEN_EXPERTS[2].megatron,
        (Part(f"{_ENTRY}.gate_up_proj", ("expert_ffn", "hidden"), of_experts="rows"),) * 2,
    ),
    Rule(
        QWEN_EXPERTS[3].megatron,
        (Part(f"{_ENTRY}.down_proj", ("hidden", "expert_ffn"), of_experts="rows"),),
    ),
)
"""Experts of a layer in one tensor, the gate of each before what it opens: what is published, while
transformers writes single experts."""

QWEN3_5_MOE = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    models="Qwen3.5 with experts, text",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        *_FULL,
        *_QWEN3_5,
        *QWEN_EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        HEAD,
    ),
    entries=_ENTRIES,
    # No layer is dense.
    names={**QWEN2_MOE.names, "ffn_hidden_size": "moe_intermediate_size"},
    settings={**_SETTINGS, "moe_shared_expert_gate": True},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    allowed=_ALLOWED,
)

QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    models="Qwen3-Next",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        *_FULL,
        *_QWEN3_NEXT,
        *QWEN_EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        HEAD,
    ),
    names=QWEN2_MOE.names,
    settings={**_SETTINGS, "moe_shared_expert_gate": True},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    allowed={**_ALLOWED, **EVERY_LAYER},
)


def linear_settings(family: Family, config: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    """Settings of linear attention; {} of a family without.

    Raises:
        CheckpointError: The kinds of layers follow no pattern.
    """
    if INTERVAL not in family.defaults:
        return {}
    layers, interval, kinds = config["num_hidden_layers"], config[INTERVAL], config.get(_KINDS)
    if kinds is not None:
        interval = kinds.index(_FULL_KIND) + 1 if _FULL_KIND in kinds else layers + 1
        if list(kinds) != layer_types(layers, interval, _LINEAR_KIND) or interval == 1:
            raise CheckpointError(
                "layers with linear attention follow no pattern",
                where=where,
                got=", ".join(map(str, kinds)),
                expected="full attention in every n-th layer, and linear attention in all others",
            )
    return {"linear_attention_freq": interval, **{name: config[name] for name in LINEAR_SIZES}}


def linear_config(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``linear_settings``: keys of ``config.json``."""
    interval = settings["linear_attention_freq"]
    if INTERVAL not in family.defaults or interval is None:
        return {}
    kinds = layer_types(settings["num_layers"], interval, _LINEAR_KIND)
    return {INTERVAL: interval, _KINDS: kinds, **{name: settings[name] for name in LINEAR_SIZES}}

"""Families with experts: Qwen3-MoE, Qwen2-MoE, OLMoE, Mixtral, MiniMax-M2 and gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.huggingface.dense_families import (
    LLAMA,
    OLMO2,
    OLMO2_KEY_NORM,
    OLMO2_QUERY_NORM,
)
from megatron_ext.huggingface.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    KEY_NORM,
    QKV,
    QKV_BIAS,
    QUERY_NORM,
    Family,
)
from megatron_ext.huggingface.rotary import PART, TURNED
from megatron_ext.huggingface.tensor_map import Layers, Part, Rule

EXPERTS_NORM = Rule(
    "decoder.layers.pre_mlp_layernorm.weight",
    (Part("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),),
)


def expert_rules(
    layer: str, router: str, gate: str, up: str, down: str, *, layers: Layers = "all"
) -> tuple[Rule, ...]:
    """Tensors of a layer of experts, by the names that a family has for them."""
    expert = f"{layer}.experts.{{expert}}"
    return (
        EXPERTS_NORM,
        Rule(
            "decoder.layers.mlp.router.weight",
            (Part(f"{layer}.{router}.weight", ("experts", "hidden")),),
            layers=layers,
        ),
        Rule(
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (
                Part(f"{expert}.{gate}.weight", ("expert_ffn", "hidden")),
                Part(f"{expert}.{up}.weight", ("expert_ffn", "hidden")),
            ),
            layers=layers,
        ),
        Rule(
            "decoder.layers.mlp.experts.experts.linear_fc2.weight",
            (Part(f"{expert}.{down}.weight", ("hidden", "expert_ffn")),),
            layers=layers,
        ),
    )


QWEN_EXPERTS = expert_rules("model.layers.{layer}.mlp", "gate", "gate_proj", "up_proj", "down_proj")

SHARED = "model.layers.{layer}.mlp.shared_expert"
SHARED_EXPERT = (
    Rule(
        "decoder.layers.mlp.shared_experts.gate_weight",
        (Part(f"{SHARED}_gate.weight", ("one", "hidden")),),
    ),
    Rule(
        "decoder.layers.mlp.shared_experts.linear_fc1.weight",
        (
            Part(f"{SHARED}.gate_proj.weight", ("shared_ffn", "hidden")),
            Part(f"{SHARED}.up_proj.weight", ("shared_ffn", "hidden")),
        ),
    ),
    Rule(
        "decoder.layers.mlp.shared_experts.linear_fc2.weight",
        (Part(f"{SHARED}.down_proj.weight", ("hidden", "shared_ffn")),),
    ),
)

EVERY_LAYER: Mapping[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
"""Experts in every layer, in Qwen's keys."""

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    models="Qwen3-MoE",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        QUERY_NORM,
        KEY_NORM,
        ATTENTION_OUTPUT,
        *QWEN_EXPERTS,
        FINAL_NORM,
        HEAD,
    ),
    names={
        "num_experts": "num_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    },
    synonyms={"num_experts": "num_local_experts"},
    settings={"qk_layernorm": True},
    defaults={
        **LLAMA.defaults,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    allowed={"hidden_act": ("silu",), "attention_bias": (False, None), **EVERY_LAYER},
)

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    models="Qwen2-MoE and Qwen1.5-MoE",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        QKV_BIAS,
        ATTENTION_OUTPUT,
        *QWEN_EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        HEAD,
    ),
    names={
        **QWEN3_MOE.names,
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    },
    settings={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    defaults={
        **QWEN3_MOE.defaults,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
        # Which layers have a window without layer_types depends on the release of transformers.
        "max_window_layers": None,
    },
    unread=("max_window_layers",),
    allowed={"hidden_act": ("silu",), "qkv_bias": (True,), **EVERY_LAYER},
    ignored=LLAMA.ignored,
)

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    models="OLMoE",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        OLMO2_QUERY_NORM,
        OLMO2_KEY_NORM,
        ATTENTION_OUTPUT,
        *QWEN_EXPERTS,
        FINAL_NORM,
        HEAD,
    ),
    names={**QWEN3_MOE.names, "moe_ffn_hidden_size": "intermediate_size"},
    synonyms=QWEN3_MOE.synonyms,
    settings={"qk_layernorm": True, "qk_layernorm_over": "heads"},
    defaults={
        **OLMO2.defaults,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    allowed={"hidden_act": ("silu",), "attention_bias": (False, None), "clip_qkv": (None,)},
)

SPARSE = "model.layers.{layer}.block_sparse_moe"

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    models="Mixtral",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        ATTENTION_OUTPUT,
        *expert_rules(SPARSE, "gate", "w1", "w3", "w2"),
        FINAL_NORM,
        HEAD,
    ),
    names={
        "num_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "intermediate_size",
    },
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
    },
    allowed={"hidden_act": ("silu",)},
)


MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    models="MiniMax-M2 and M2.1",
    rules=(
        *(EMBEDDING, INPUT_NORM, QKV, OLMO2_QUERY_NORM, OLMO2_KEY_NORM, ATTENTION_OUTPUT),
        *expert_rules(SPARSE, "gate", "w1", "w3", "w2"),
        Rule(
            "decoder.layers.mlp.router.expert_bias",
            (Part(f"{SPARSE}.e_score_correction_bias", ("experts",)),),
        ),
        *(FINAL_NORM, HEAD),
    ),
    names=MIXTRAL.names,
    settings={
        **OLMOE.settings,
        "moe_router_score_function": "sigmoid",
        "moe_router_expert_bias": True,
    },
    defaults={
        **LLAMA.defaults,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5_000_000.0,
        PART: None,
        TURNED: None,
    },
    allowed={"hidden_act": ("silu",)},
)


LAYER = "model.layers.{layer}"
OF_ALL_EXPERTS = f"{LAYER}.mlp.experts"
SINKS = Rule(
    "decoder.layers.self_attention.core_attention.softmax_offset",
    (Part(f"{LAYER}.self_attn.sinks", ("heads",)),),
)
GPT_OSS_EXPERTS = (
    EXPERTS_NORM,
    Rule(
        "decoder.layers.mlp.router.weight",
        (Part(f"{LAYER}.mlp.router.weight", ("experts", "hidden")),),
    ),
    Rule("decoder.layers.mlp.router.bias", (Part(f"{LAYER}.mlp.router.bias", ("experts",)),)),
    # Columns of gate and of what it opens take turns.
    Rule(
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        tuple(
            Part(f"{OF_ALL_EXPERTS}.gate_up_proj", ("expert_ffn", "hidden"), "columns", first, 2)
            for first in (0, 1)
        ),
    ),
    Rule(
        "decoder.layers.mlp.experts.experts.linear_fc1.bias",
        tuple(
            Part(f"{OF_ALL_EXPERTS}.gate_up_proj_bias", ("expert_ffn",), "rows", first, 2)
            for first in (0, 1)
        ),
    ),
    Rule(
        "decoder.layers.mlp.experts.experts.linear_fc2.weight",
        (Part(f"{OF_ALL_EXPERTS}.down_proj", ("hidden", "expert_ffn"), "columns"),),
    ),
    Rule(
        "decoder.layers.mlp.experts.experts.linear_fc2.bias",
        (Part(f"{OF_ALL_EXPERTS}.down_proj_bias", ("hidden",), "rows"),),
    ),
)

GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    models="gpt-oss",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        QKV_BIAS,
        SINKS,
        ATTENTION_OUTPUT,
        Rule(
            "decoder.layers.self_attention.linear_proj.bias",
            (Part(f"{LAYER}.self_attn.o_proj.bias", ("hidden",)),),
        ),
        *GPT_OSS_EXPERTS,
        FINAL_NORM,
        HEAD,
    ),
    names={
        "num_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "intermediate_size",
        "gate_limit": "swiglu_limit",
    },
    settings={
        "attention_sinks": True,
        "add_bias_linear": True,
        "gate_activation": "quick_gelu",
        "gated_offset": 1.0,
    },
    defaults={
        **LLAMA.defaults,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        # Where a file has nothing on it.
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    allowed={
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "attention_dropout": (0.0,),
    },
    quantisations=("mxfp4",),
)

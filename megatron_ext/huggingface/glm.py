"""GLM's families, dense and with experts, and ERNIE's, which rotates as the dense ones do."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.huggingface.deepseek import (
    DEEPSEEK_V3,
    EXPERT_BIAS,
    FEED_FORWARD,
    KINDS,
    NEXT,
    OF_EXPERTS,
)
from megatron_ext.huggingface.dense_families import LLAMA, PHI3_MLP_INPUT
from megatron_ext.huggingface.expert_families import EXPERTS_NORM
from megatron_ext.huggingface.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    KEY_NORM,
    MLP_NORM,
    MLP_OUTPUT,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    QKV,
    QKV_BIAS,
    QUERY_NORM,
    RULES,
    Family,
    only_with,
)
from megatron_ext.huggingface.rotary import PART
from megatron_ext.huggingface.tensor_map import Part, Rule


def _paired(rule: Rule) -> Rule:
    """A rule of queries and keys whose neighbouring rows are rotated together."""
    return replace(rule, order="paired_by_query_group")


GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    models="GLM-4 9B of 2024",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        _paired(QKV),
        _paired(only_with(QKV_BIAS, "biased_query", "biased_key_value", "biased_key_value")),
        ATTENTION_OUTPUT,
        MLP_NORM,
        PHI3_MLP_INPUT,
        MLP_OUTPUT,
        FINAL_NORM,
        HEAD,
    ),
    names={"add_qkv_bias": "attention_bias"},
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        PART: 0.5,
    },
    allowed={"hidden_act": ("silu",)},
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    models="GLM-4 and Z1 of 2025, dense",
    rules=(
        *GLM.rules[:5],
        Rule(
            POST_ATTENTION_NORM.megatron,
            (Part("model.layers.{layer}.post_self_attn_layernorm.weight", ("hidden",)),),
        ),
        *GLM.rules[5:8],
        Rule(
            POST_MLP_NORM.megatron,
            (Part("model.layers.{layer}.post_mlp_layernorm.weight", ("hidden",)),),
        ),
        *GLM.rules[8:],
    ),
    settings={"post_layernorms": True},
)


ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    models="ERNIE 4.5, dense",
    rules=tuple(_paired(QKV) if rule is QKV else rule for rule in RULES),
    defaults={
        **LLAMA.defaults,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
    allowed={"hidden_act": ("silu",), "use_bias": (False, None)},
)


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    defaults={
        **DEEPSEEK_V3.defaults,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        KINDS: None,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
    },
)


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    models="GLM-4.5, 4.6 and 4.5-Air, text",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        only_with(QKV_BIAS, "biased_query", "biased_key_value", "biased_key_value"),
        *(only_with(rule, "normed_head") for rule in (QUERY_NORM, KEY_NORM)),
        ATTENTION_OUTPUT,
        replace(MLP_NORM, layers="dense"),
        *(
            replace(rule, layers="experts") if rule is EXPERTS_NORM else rule
            for rule in FEED_FORWARD
        ),
        EXPERT_BIAS,
        FINAL_NORM,
        HEAD,
    ),
    names={
        **{name: DEEPSEEK_V3.names[name] for name in OF_EXPERTS},
        "add_qkv_bias": "attention_bias",
        "qk_layernorm": "use_qk_norm",
    },
    settings=DEEPSEEK_V3.settings,
    defaults={
        **LLAMA.defaults,
        **{key: DEEPSEEK_V3.defaults[key] for key in ("norm_topk_prob", NEXT)},
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        PART: 0.5,
    },
    allowed={"hidden_act": ("silu",), "norm_topk_prob": (True,)},
)

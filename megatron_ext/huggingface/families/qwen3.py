"""Qwen3, dense: Llama with norms of each query and key head, and heads of any width."""

from __future__ import annotations

from megatron_ext.huggingface.families import llama
from megatron_ext.huggingface.families.family import Family
from megatron_ext.huggingface.tensor_map import Part, Rule

QUERY_NORM = Rule(
    "decoder.layers.self_attention.q_layernorm.weight",
    (Part("model.layers.{layer}.self_attn.q_norm.weight", ("head",)),),
)
KEY_NORM = Rule(
    "decoder.layers.self_attention.k_layernorm.weight",
    (Part("model.layers.{layer}.self_attn.k_norm.weight", ("head",)),),
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    rules=(
        llama.EMBEDDING,
        llama.INPUT_NORM,
        llama.QKV,
        QUERY_NORM,
        KEY_NORM,
        llama.ATTENTION_OUTPUT,
        llama.MLP_NORM,
        llama.MLP_INPUT,
        llama.MLP_OUTPUT,
        llama.FINAL_NORM,
        llama.HEAD,
    ),
    settings={"qk_layernorm": True},
    defaults={
        **llama.LLAMA.defaults,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    allowed={"hidden_act": ("silu",), "attention_bias": (False, None)},
)

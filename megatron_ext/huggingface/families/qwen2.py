"""Qwen2 and Qwen2.5: Llama with biases of query, key and value."""

from __future__ import annotations

from megatron_ext.huggingface.families import llama
from megatron_ext.huggingface.families.family import Family
from megatron_ext.huggingface.tensor_map import Part, Rule

QKV_BIAS = Rule(
    "decoder.layers.self_attention.linear_qkv.bias",
    (
        Part("model.layers.{layer}.self_attn.q_proj.bias", ("query",)),
        Part("model.layers.{layer}.self_attn.k_proj.bias", ("key_value",)),
        Part("model.layers.{layer}.self_attn.v_proj.bias", ("key_value",)),
    ),
    order="by_query_group",
)

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    rules=(
        llama.EMBEDDING,
        llama.INPUT_NORM,
        llama.QKV,
        QKV_BIAS,
        llama.ATTENTION_OUTPUT,
        llama.MLP_NORM,
        llama.MLP_INPUT,
        llama.MLP_OUTPUT,
        llama.FINAL_NORM,
        llama.HEAD,
    ),
    settings={"add_qkv_bias": True},
    defaults={
        **llama.LLAMA.defaults,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    allowed={"hidden_act": ("silu",)},
    ignored=llama.LLAMA.ignored,
)

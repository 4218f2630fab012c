"""Gemma 3, text: Gemma with norms behind attention and feed-forward too, and two kinds of layers.

Most layers see a window and rotate by a base of their own; every sixth sees all.
"""

from __future__ import annotations

from megatron_ext.huggingface.families import llama, qwen3
from megatron_ext.huggingface.families.family import Family
from megatron_ext.huggingface.families.gemma import GEMMA
from megatron_ext.huggingface.tensor_map import Part, Rule

POST_ATTENTION_NORM = Rule(
    "decoder.layers.self_attention.linear_proj.post_layernorm.weight",
    (Part("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),),
)
MLP_NORM = Rule(
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    (Part("model.layers.{layer}.pre_feedforward_layernorm.weight", ("hidden",)),),
)
POST_MLP_NORM = Rule(
    "decoder.layers.mlp.linear_fc2.post_layernorm.weight",
    (Part("model.layers.{layer}.post_feedforward_layernorm.weight", ("hidden",)),),
)

GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    rules=(
        llama.EMBEDDING,
        llama.INPUT_NORM,
        llama.QKV,
        qwen3.QUERY_NORM,
        qwen3.KEY_NORM,
        llama.ATTENTION_OUTPUT,
        POST_ATTENTION_NORM,
        MLP_NORM,
        llama.MLP_INPUT,
        llama.MLP_OUTPUT,
        POST_MLP_NORM,
        llama.FINAL_NORM,
        llama.HEAD,
    ),
    settings={**GEMMA.settings, "qk_layernorm": True, "post_layernorms": True},
    defaults={
        **GEMMA.defaults,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    allowed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False, None),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
)

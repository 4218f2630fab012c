"""Gemma's families; each is what it has beside Llama's tensors and settings."""

from __future__ import annotations

from megatron_ext.huggingface.dense_families import LLAMA
from megatron_ext.huggingface.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    KEY_NORM,
    MLP_INPUT,
    MLP_OUTPUT,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    QKV,
    QUERY_NORM,
    RULES,
    Family,
)
from megatron_ext.huggingface.tensor_map import Part, Rule

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    models="Gemma",
    rules=RULES,
    settings={
        "layernorm_zero_centered_gamma": True,
        "gate_activation": "gelu_tanh",
        "scale_embeddings": True,
    },
    defaults={**LLAMA.defaults, "tie_word_embeddings": True, "head_dim": 256},
    allowed={
        # The first releases say "gelu" for its tanh form, and transformers reads it so.
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "attention_bias": (False, None),
        "use_bidirectional_attention": (None, False),
    },
    ignored=LLAMA.ignored,
)


GEMMA3_MLP_NORM = Rule(
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    (Part("model.layers.{layer}.pre_feedforward_layernorm.weight", ("hidden",)),),
)
GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    models="Gemma 3, text",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        QUERY_NORM,
        KEY_NORM,
        ATTENTION_OUTPUT,
        POST_ATTENTION_NORM,
        GEMMA3_MLP_NORM,
        MLP_INPUT,
        MLP_OUTPUT,
        POST_MLP_NORM,
        FINAL_NORM,
        HEAD,
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


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    models="Gemma 2",
    rules=tuple(rule for rule in GEMMA3.rules if rule not in (QUERY_NORM, KEY_NORM)),
    settings={**GEMMA.settings, "post_layernorms": True},
    defaults={
        **GEMMA.defaults,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    allowed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False, None),
        "use_bidirectional_attention": (None, False),
    },
)

"""The families of HuggingFace models that are read and written.

- Llama 2, 3, 3.1 and 3.2 (text), and models published in their format;
- Mistral 7B: Llama's tensors, and sliding-window attention in some releases;
- Qwen2 and Qwen2.5: Llama with biases of query, key and value;
- Qwen3, dense: Llama with norms of query and key heads, and an explicit head width;
- Gemma (1): scaled embeddings, gated GELU, and norm weights that are added to one;
- Gemma 3, text: Gemma with additional norms behind attention and feed-forward. Every sixth layer
  has full attention; the others have a sliding window and a rotary base of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.huggingface.tensor_map import Part, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers: its tensors, and the meaning of its ``config.json``."""

    architecture: str
    """Class name in ``architectures`` of ``config.json``."""

    model_type: str

    models: str
    """Published models of the family."""

    rules: tuple[Rule, ...]
    """Tensors, including the head, which a model with tied embeddings lacks."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings common to all models of the family that differ from Llama's."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for keys that ``config.json`` may leave out."""

    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values supported by megatron-core, by key, the usual one first; other keys are unchecked."""

    ignored: tuple[str, ...] = ()
    """Suffixes of tensor names that hold no trained weights."""


EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    (Part("model.embed_tokens.weight", ("vocabulary", "hidden")),),
)
INPUT_NORM = Rule(
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    (Part("model.layers.{layer}.input_layernorm.weight", ("hidden",)),),
)
QKV = Rule(
    "decoder.layers.self_attention.linear_qkv.weight",
    (
        Part("model.layers.{layer}.self_attn.q_proj.weight", ("query", "hidden")),
        Part("model.layers.{layer}.self_attn.k_proj.weight", ("key_value", "hidden")),
        Part("model.layers.{layer}.self_attn.v_proj.weight", ("key_value", "hidden")),
    ),
    order="by_query_group",
)
ATTENTION_OUTPUT = Rule(
    "decoder.layers.self_attention.linear_proj.weight",
    (Part("model.layers.{layer}.self_attn.o_proj.weight", ("hidden", "query")),),
)
MLP_NORM = Rule(
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    (Part("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),),
)
MLP_INPUT = Rule(
    "decoder.layers.mlp.linear_fc1.weight",
    (
        Part("model.layers.{layer}.mlp.gate_proj.weight", ("ffn", "hidden")),
        Part("model.layers.{layer}.mlp.up_proj.weight", ("ffn", "hidden")),
    ),
)
MLP_OUTPUT = Rule(
    "decoder.layers.mlp.linear_fc2.weight",
    (Part("model.layers.{layer}.mlp.down_proj.weight", ("hidden", "ffn")),),
)
FINAL_NORM = Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", ("hidden",)),))
HEAD = Rule("output_layer.weight", (Part("lm_head.weight", ("vocabulary", "hidden")),))

RULES = (
    EMBEDDING,
    INPUT_NORM,
    QKV,
    ATTENTION_OUTPUT,
    MLP_NORM,
    MLP_INPUT,
    MLP_OUTPUT,
    FINAL_NORM,
    HEAD,
)

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    models="Llama 2, 3, 3.1 and 3.2 (text), and what is published in their format",
    rules=RULES,
    defaults={
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
    },
    allowed={
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    },
    # A buffer saved by early releases.
    ignored=("self_attn.rotary_emb.inv_freq",),
)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    models="Mistral 7B and Nemo",
    rules=RULES,
    defaults={**LLAMA.defaults, "num_key_value_heads": 8, "sliding_window": 4096},
    allowed={"hidden_act": ("silu",)},
    ignored=LLAMA.ignored,
)


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
    models="Qwen2 and Qwen2.5",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        QKV_BIAS,
        ATTENTION_OUTPUT,
        MLP_NORM,
        MLP_INPUT,
        MLP_OUTPUT,
        FINAL_NORM,
        HEAD,
    ),
    settings={"add_qkv_bias": True},
    defaults={
        **LLAMA.defaults,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    allowed={"hidden_act": ("silu",)},
    ignored=LLAMA.ignored,
)


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
    models="Qwen3, dense",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV,
        QUERY_NORM,
        KEY_NORM,
        ATTENTION_OUTPUT,
        MLP_NORM,
        MLP_INPUT,
        MLP_OUTPUT,
        FINAL_NORM,
        HEAD,
    ),
    settings={"qk_layernorm": True},
    defaults={
        **LLAMA.defaults,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    allowed={"hidden_act": ("silu",), "attention_bias": (False, None)},
)


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


POST_ATTENTION_NORM = Rule(
    "decoder.layers.self_attention.linear_proj.post_layernorm.weight",
    (Part("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),),
)
GEMMA3_MLP_NORM = Rule(
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


FAMILIES: Mapping[str, Family] = {
    family.architecture: family for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, GEMMA3)
}
"""Families by architecture; a model that several can express is written as the first."""

UNSUPPORTED: Mapping[str, str] = {
    "Gemma2ForCausalLM": "it caps attention scores and logits by a tanh, which neither "
    "megatron-core's attention nor losses from hidden states do",
    "Gemma3ForConditionalGeneration": "it reads images; "
    "the text models alone are Gemma3ForCausalLM",
    "Qwen3MoeForCausalLM": "it is not a dense model",
    "MixtralForCausalLM": "it is not a dense model",
}
"""Reasons why similar architectures are not supported."""

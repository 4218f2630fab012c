"""Llama 2, 3, 3.1 and 3.2 (text), and every model that was published in their format."""

from __future__ import annotations

from megatron_ext.huggingface.families.family import Family
from megatron_ext.huggingface.tensor_map import Part, Rule

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
    # A buffer that early releases saved.
    ignored=("self_attn.rotary_emb.inv_freq",),
)

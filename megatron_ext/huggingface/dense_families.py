"""Families without experts; each is what it has beside Llama's tensors and settings."""

from __future__ import annotations

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
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    QKV,
    QKV_BIAS,
    QUERY_NORM,
    RULES,
    Family,
)
from megatron_ext.huggingface.rotary import LENGTH, PART, QUERY_GROWTH
from megatron_ext.huggingface.tensor_map import Part, Rule, Size

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
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        # Where a file has them, transformers takes Ministral's layers.
        "layer_types": None,
    },
    allowed={"hidden_act": ("silu",)},
    ignored=LLAMA.ignored,
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
        "max_window_layers": 28,
    },
    allowed={"hidden_act": ("silu",)},
    ignored=LLAMA.ignored,
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
        "max_window_layers": 28,
    },
    allowed={"hidden_act": ("silu",), "attention_bias": (False, None)},
)


SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    models="Seed-OSS",
    rules=QWEN2.rules,
    settings=QWEN2.settings,
    defaults={**LLAMA.defaults, "num_key_value_heads": 8, "head_dim": 128},
    allowed={
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "attention_out_bias": (False,),
        "mlp_bias": (False,),
    },
)


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    models="Ministral 3, text",
    rules=RULES,
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        # Where a file has nothing on it.
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            LENGTH: 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            QUERY_GROWTH: 0.1,
        },
    },
    allowed={"hidden_act": ("silu",)},
)


PHI3_LAYER = "model.layers.{layer}"
PHI3_QKV = Rule(
    QKV.megatron,
    tuple(
        Part(f"{PHI3_LAYER}.self_attn.qkv_proj.weight", (size, "hidden"))
        for size in ("query", "key_value", "key_value")
    ),
    order="by_query_group",
)
PHI3_MLP_INPUT = Rule(
    MLP_INPUT.megatron, (Part(f"{PHI3_LAYER}.mlp.gate_up_proj.weight", ("ffn", "hidden")),) * 2
)

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    models="Phi-3, Phi-3.5 and Phi-4, text and dense",
    rules=(
        EMBEDDING,
        INPUT_NORM,
        PHI3_QKV,
        ATTENTION_OUTPUT,
        MLP_NORM,
        PHI3_MLP_INPUT,
        MLP_OUTPUT,
        FINAL_NORM,
        HEAD,
    ),
    defaults={
        **LLAMA.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        LENGTH: 4096,
        PART: 1.0,
    },
    allowed={"hidden_act": ("silu",)},
)


OLMO2_QUERY_NORM = Rule(QUERY_NORM.megatron, (Part(QUERY_NORM.parts[0].name, ("query",)),))
OLMO2_KEY_NORM = Rule(KEY_NORM.megatron, (Part(KEY_NORM.parts[0].name, ("key_value",)),))

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    models="OLMo 2",
    rules=(
        EMBEDDING,
        QKV,
        OLMO2_QUERY_NORM,
        OLMO2_KEY_NORM,
        ATTENTION_OUTPUT,
        POST_ATTENTION_NORM,
        MLP_INPUT,
        MLP_OUTPUT,
        POST_MLP_NORM,
        FINAL_NORM,
        HEAD,
    ),
    settings={
        "qk_layernorm": True,
        "qk_layernorm_over": "heads",
        "pre_layernorms": False,
        "post_layernorms": True,
    },
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    allowed={"hidden_act": ("silu",), "attention_bias": (False, None)},
)
OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    models="OLMo 3",
    rules=OLMO2.rules,
    # Layers with a window have the base of the others, unscaled.
    synonyms={"rope_local_base_freq": "rope_theta"},
    settings=OLMO2.settings,
    defaults={
        **OLMO2.defaults,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    allowed=OLMO2.allowed,
)


EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    models="EXAONE 4",
    rules=tuple(
        {OLMO2_QUERY_NORM: QUERY_NORM, OLMO2_KEY_NORM: KEY_NORM}.get(rule, rule)
        for rule in OLMO2.rules
    ),
    settings={**OLMO2.settings, "qk_layernorm_over": "head"},
    turns_all_layers=False,
    defaults={**OLMO2.defaults, "sliding_window": 4096, "sliding_window_pattern": 4},
    allowed={"hidden_act": ("silu",)},
)


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    models="SmolLM3",
    rules=RULES,
    defaults={
        **LLAMA.defaults,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    allowed={**LLAMA.allowed, "use_sliding_window": (False, None)},
)


GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    models="Granite 3, dense",
    rules=RULES,
    names={
        "softmax_scale": "attention_multiplier",
        "residual_multiplier": "residual_multiplier",
        "embedding_multiplier": "embedding_multiplier",
        "logits_scaling": "logits_scaling",
    },
    defaults={
        **LLAMA.defaults,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    allowed=LLAMA.allowed,
)


NEOX_LAYER = "gpt_neox.layers.{layer}"


def _neox(megatron: str, name: str, shape: tuple[Size, ...]) -> tuple[Rule, Rule]:
    """The weights and biases of a norm or of a linear layer."""
    joint = "_" if megatron.endswith("layer_norm") else "."
    return (
        Rule(f"{megatron}{joint}weight", (Part(f"{name}.weight", shape),)),
        Rule(f"{megatron}{joint}bias", (Part(f"{name}.bias", shape[:1]),)),
    )


def _neox_qkv(kind: str, *columns: Size) -> Rule:
    """Query, key and value of a head one after the other, as megatron-core has them."""
    name = f"{NEOX_LAYER}.attention.query_key_value.{kind}"
    megatron = f"decoder.layers.self_attention.linear_qkv.{kind}"
    return Rule(megatron, tuple(Part(name, ("query", *columns)) for _ in "qkv"))


GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    models="Pythia, GPT-NeoX",
    rules=(
        Rule(EMBEDDING.megatron, (Part("gpt_neox.embed_in.weight", ("vocabulary", "hidden")),)),
        *_neox(
            "decoder.layers.self_attention.linear_qkv.layer_norm",
            f"{NEOX_LAYER}.input_layernorm",
            ("hidden",),
        ),
        _neox_qkv("weight", "hidden"),
        _neox_qkv("bias"),
        *_neox(
            "decoder.layers.self_attention.linear_proj",
            f"{NEOX_LAYER}.attention.dense",
            ("hidden", "query"),
        ),
        *_neox(
            "decoder.layers.mlp.linear_fc1.layer_norm",
            f"{NEOX_LAYER}.post_attention_layernorm",
            ("hidden",),
        ),
        *_neox(
            "decoder.layers.mlp.linear_fc1", f"{NEOX_LAYER}.mlp.dense_h_to_4h", ("ffn", "hidden")
        ),
        *_neox(
            "decoder.layers.mlp.linear_fc2", f"{NEOX_LAYER}.mlp.dense_4h_to_h", ("hidden", "ffn")
        ),
        *_neox("decoder.final_layernorm", "gpt_neox.final_layer_norm", ("hidden",)),
        Rule(HEAD.megatron, (Part("embed_out.weight", ("vocabulary", "hidden")),)),
    ),
    names={"layernorm_epsilon": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
    synonyms={"rope_theta": "rotary_emb_base", PART: "rotary_pct"},
    settings={"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True},
    defaults={
        **LLAMA.defaults,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        PART: 0.25,
    },
    unread=("num_key_value_heads", "head_dim"),
    allowed={"hidden_act": ("gelu",), "attention_bias": (True,)},
    ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
)

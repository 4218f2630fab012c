"""Tiny models of each family, made by transformers' own classes with random weights."""

import os
from importlib.metadata import version

import torch
from safetensors.torch import load_file

VOCAB_SIZE = 301
"""Odd, so that every layout pads it, and more than the tokenizer has ids."""

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
    *("first_k_dense_replace", "tie_word_embeddings"),
)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": False}

LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e5,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
OF_LINEAR_EXPERTS = {
    **LINEAR,
    **EXPERTS,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "norm_topk_prob": True, **EXPERTS, "moe_intermediate_size": 24},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "norm_topk_prob": False,
            **EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "qkv_bias": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"norm_topk_prob": False, **EXPERTS}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "exaone4": (
        "Exaone4",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {**LLAMA3_ROPE, "factor": 16.0},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **{name: LATENT[name] for name in OF_EXPERTS},
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
    ),
    "glm": ("Glm", {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4", {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"hidden_size": 64, "partial_rotary_factor": 0.75}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 8, "no_rope_layer_interval": 3}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12,
            "logits_scaling": 1.5,
        },
    ),
    "gpt-neox": (
        "GPTNeoX",
        {"hidden_size": 64, "rotary_pct": 0.25, "rotary_emb_base": 5000, "layer_norm_eps": 1e-5},
    ),
}
"""transformers' name and what its configuration differs in, by a name of our own."""


LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 2.0, 3.5, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 1.0,
    "beta_slow": 0.01,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 8,
}
MORE_MODELS = {
    "ernie4.5": ("Ernie4_5", {"head_dim": 12}),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **{name: size for name, size in LATENT.items() if name != "first_k_dense_replace"},
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "num_mtp_layers": 0,
        },
    ),
    "qwen3.5": ("Qwen3_5", LINEAR),
    "qwen3.5-moe": ("Qwen3_5Moe", OF_LINEAR_EXPERTS),
    "qwen3-next": ("Qwen3Next", OF_LINEAR_EXPERTS),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "sliding_window": None,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN,
            "num_mtp_layers": 0,
        },
    ),
    "qwen3-yarn": (
        "Qwen3",
        {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "smollm3-yarn": (
        "SmolLM3",
        {
            "num_hidden_layers": 8,
            "no_rope_layer_interval": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 2000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e5,
                    "factor": 8.0,
                    "attention_factor": 1.2,
                    "beta_fast": 1.0,
                    "beta_slow": 0.01,
                    "original_max_position_embeddings": 8,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e5},
            },
        },
    ),
    "phi4-mini": (
        "Phi3",
        {
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 1.0,
                "beta_slow": 0.01,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
        },
    ),
}
"""Models that need their own config.json to be written, or that transformers 4 does not have."""


OF_ALL_TEXT = (
    *("deepseek-v2", "glm4-moe", "qwen3-yarn", "smollm3"),
    *("olmo2", "olmoe", "seed-oss", "ministral3"),
    *("qwen3.5-moe", "glm", "ernie4.5", "glm4-moe-lite"),
)
"""Models whose parts others have, too, which are compared with MEGATRON_EXT_ALL_TEXT=1 alone."""
SINCE_5 = ("minimax-m2", "ministral3", "qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe-lite")
"""Models that transformers 4 does not have."""
COMPARED = {
    name: model
    for name, model in {**MODELS, **MORE_MODELS}.items()
    if (name not in OF_ALL_TEXT or os.environ.get("MEGATRON_EXT_ALL_TEXT") == "1")
    and (name not in SINCE_5 or int(version("transformers").split(".")[0]) >= 5)
}
"""Models whose logits and tensors are compared with those of transformers."""


_BY_SEED = (
    *("gemma", "gemma3", "llama", "llama-tied", "mistral", "mixtral"),
    *("qwen2", "qwen2-moe", "qwen3", "qwen3-moe"),
    *("phi3", "olmo2", "smollm3", "granite", "gpt-neox", "phi4-mini"),
    *("gpt-oss", "deepseek-v3", "deepseek-v2", "gemma2"),
    *("glm4-moe", "qwen3-yarn", "olmo3", "smollm3-yarn"),
    *("olmoe", "seed-oss", "exaone4", "minimax-m2", "ministral3"),
    *("qwen3.5", "qwen3.5-moe", "qwen3-next"),
    *("glm", "glm4", "ernie4.5", "glm4-moe-lite"),
)
"""Models by the seed of their weights; one that is added at the end changes no other."""


def hf_config(name, **sizes):
    """transformers' configuration of a model."""
    import transformers

    kind, options = {**MODELS, **MORE_MODELS}[name]
    make_config = getattr(transformers, f"{_CONFIGS.get(kind, kind)}Config")
    return make_config(**{**SIZES, **in_words_of_release(options), **sizes})


def hf_model(name, **sizes):
    """A model with random weights everywhere, norms and biases included."""
    import transformers

    kind, _ = {**MODELS, **MORE_MODELS}[name]
    config = hf_config(name, **sizes)
    torch.manual_seed(_BY_SEED.index(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            if parameter_name.endswith("A_log"):
                # Linear attention that remembers more than the last tokens.
                parameter.sub_(4)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    return model.eval()


def in_words_of_release(options):
    """Options of a configuration with rotary embeddings as the installed transformers has them."""
    if "rope_parameters" not in options or int(version("transformers").split(".")[0]) >= 5:
        return options
    words = {name: value for name, value in options.items() if name != "rope_parameters"}
    rope = options["rope_parameters"]
    if "sliding_attention" in rope:
        words["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {**words, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


_CONFIGS = {
    "Gemma3": "Gemma3Text",
    "Qwen3_5": "Qwen3_5Text",
    "Qwen3_5Moe": "Qwen3_5MoeText",
}


def save_model(name, folder, *, dtype=torch.float32, **sizes):
    """It as a folder of two safetensors files or more, with a tokenizer and a chat template."""
    model = hf_model(name, **sizes).to(dtype)
    model.generation_config.max_new_tokens = 8
    model.save_pretrained(folder, max_shard_size="60KB")
    save_tokenizer(folder)
    return folder


def save_tokenizer(
    folder,
    *,
    text="the theory of the other thing then there",
    control_tokens=("<pad>", "<s>", "</s>"),
):
    """A byte-level BPE tokenizer of fewer ids than ``VOCAB_SIZE``, trained on a text."""
    from transformers import PreTrainedTokenizerFast

    from tests.tokenizers.tokenizer_files import byte_level_bpe

    PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe([text] * 4, VOCAB_SIZE - 11, control_tokens),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def some_tokens():
    """[2, 24] int64"""
    return torch.randint(0, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(7))


def weights_of_logits():
    """[2, 24, V], of a loss that is the sum of the logits weighed by these."""
    return torch.randn(2, 24, VOCAB_SIZE, generator=torch.Generator().manual_seed(8))


def tensors_of(folder):
    """All weights of a folder, by name."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}

"""Gemma (the first): scaled embeddings, gated GELU, and norms whose weights are added to one."""

from __future__ import annotations

from megatron_ext.huggingface.families import llama
from megatron_ext.huggingface.families.family import Family

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    rules=llama.RULES,
    settings={
        "layernorm_zero_centered_gamma": True,
        "gate_activation": "gelu_tanh",
        "scale_embeddings": True,
    },
    defaults={**llama.LLAMA.defaults, "tie_word_embeddings": True, "head_dim": 256},
    allowed={
        # The first releases say gelu and mean its tanh form, which transformers takes it for.
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "attention_bias": (False, None),
        "use_bidirectional_attention": (None, False),
    },
    ignored=llama.LLAMA.ignored,
)

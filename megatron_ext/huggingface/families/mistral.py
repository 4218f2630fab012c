"""Mistral 7B and its kin: Llama's tensors, and a window over attention in some releases."""

from __future__ import annotations

from megatron_ext.huggingface.families import llama
from megatron_ext.huggingface.families.family import Family

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    rules=llama.RULES,
    defaults={**llama.LLAMA.defaults, "num_key_value_heads": 8, "sliding_window": 4096},
    allowed={"hidden_act": ("silu",)},
    ignored=llama.LLAMA.ignored,
)

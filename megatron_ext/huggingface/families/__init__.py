"""The families of models that are read and written, a file for each."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.huggingface.families.family import Family
from megatron_ext.huggingface.families.gemma import GEMMA
from megatron_ext.huggingface.families.gemma3 import GEMMA3
from megatron_ext.huggingface.families.llama import LLAMA
from megatron_ext.huggingface.families.mistral import MISTRAL
from megatron_ext.huggingface.families.qwen2 import QWEN2
from megatron_ext.huggingface.families.qwen3 import QWEN3

FAMILIES: Mapping[str, Family] = {
    family.architecture: family for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, GEMMA3)
}
"""By architecture. Where several can say a model, the first does."""

UNSUPPORTED: Mapping[str, str] = {
    "Gemma2ForCausalLM": "it caps attention scores and logits by a tanh, which neither "
    "megatron-core's attention nor losses from hidden states do",
    "Gemma3ForConditionalGeneration": "it reads images; "
    "the text models alone are Gemma3ForCausalLM",
    "Qwen3MoeForCausalLM": "it is no dense model",
    "MixtralForCausalLM": "it is no dense model",
}
"""Why some that look near are not read."""

__all__ = ["FAMILIES", "UNSUPPORTED", "Family"]

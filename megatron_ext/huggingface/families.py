"""The families of HuggingFace models that are read and written, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.huggingface.dense_families import (
    GEMMA,
    GEMMA3,
    GPT_NEOX,
    GRANITE,
    LLAMA,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from megatron_ext.huggingface.expert_families import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from megatron_ext.huggingface.family import Family

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, GEMMA3),
        *(PHI3, OLMO2, SMOLLM3, GRANITE, GPT_NEOX),
        *(QWEN3_MOE, QWEN2_MOE, MIXTRAL),
    )
}
"""Families by architecture; a model that several can express is written as the first."""

UNSUPPORTED: Mapping[str, str] = {
    "Gemma2ForCausalLM": "it caps attention scores and logits by a tanh, which neither "
    "megatron-core's attention nor losses from hidden states do",
    "Gemma3ForConditionalGeneration": "it reads images; "
    "the text models alone are Gemma3ForCausalLM",
    "DeepseekV2ForCausalLM": "latent attention (MLA) and dense layers before those of experts "
    "are not built here",
    "DeepseekV3ForCausalLM": "latent attention (MLA), dense layers before those of experts and "
    "the choice among groups of experts are not built here",
    "GptOssForCausalLM": "sinks in attention, biases of experts and their clamped activation are "
    "not built here",
}
"""Reasons why similar architectures are not supported."""

"""The families of HuggingFace models that are read and written, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megatron_ext.huggingface.dense_families import (
    EXAONE4,
    GPT_NEOX,
    GRANITE,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from megatron_ext.huggingface.expert_families import (
    GPT_OSS,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from megatron_ext.huggingface.family import Family
from megatron_ext.huggingface.gemma import GEMMA, GEMMA2, GEMMA3
from megatron_ext.huggingface.glm import ERNIE4_5, GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE
from megatron_ext.huggingface.hybrid_families import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA, GEMMA2, GEMMA3),
        *(PHI3, OLMO2, OLMO3, SMOLLM3, GRANITE, GPT_NEOX, SEED_OSS, MINISTRAL3, EXAONE4),
        *(GLM, GLM4, ERNIE4_5),
        *(QWEN3_MOE, QWEN2_MOE, OLMOE, MIXTRAL, MINIMAX_M2, GPT_OSS),
        *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE),
        *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT),
    )
}
"""Families by architecture; a model that several can express is written as the first."""

_STATE_SPACE = "layers of state-space models (Mamba) are not built here"
_SPARSE = "attention to tokens that an indexer chooses is not built here"
_ONE_NORM = "attention and feed-forward layer of its layers share one norm, which is not built here"

UNSUPPORTED: Mapping[str, str] = {
    "Gemma3nForConditionalGeneration": "its parallel residual streams and embeddings of each "
    "layer are not built here",
    **dict.fromkeys(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        "heads of two widths, values that are keys and embeddings of each layer are not built here",
    ),
    **dict.fromkeys(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), _SPARSE),
    "KimiLinearForCausalLM": "linear attention with a decay of each channel is not built here",
    "OlmoHybridForCausalLM": "linear attention with corrections beyond one is not built here",
    "Lfm2ForCausalLM": "layers of short convolutions are not built here",
    "Llama4ForCausalLM": "attention within chunks, norms without weights and experts whose input "
    "is scaled are not built here",
    "Llama4ForConditionalGeneration": "attention within chunks, norms without weights and experts "
    "whose input is scaled are not built here",
    "MllamaForConditionalGeneration": "layers of attention to images, among those of text, are "
    "not built here",
    "Qwen3VLMoeForConditionalGeneration": "its files, with the experts of a layer in one "
    "tensor, are not read",
    "GraniteMoeForCausalLM": "its files, with the experts of a layer in one tensor, are not read",
    "NemotronForCausalLM": "feed-forward layers of squared ReLU are not built here",
    "ArceeForCausalLM": "feed-forward layers of squared ReLU are not built here",
    "ApertusForCausalLM": "feed-forward layers of xIELU are not built here",
    "HunYuanDenseV1ForCausalLM": "norms of queries and keys behind their rotation are not built "
    "here",
    "PhiForCausalLM": _ONE_NORM,
    "CohereForCausalLM": _ONE_NORM,
    "Cohere2ForCausalLM": _ONE_NORM,
    "RecurrentGemmaForCausalLM": "recurrent layers (RG-LRU) are not built here",
    **dict.fromkeys(
        (
            "BambaForCausalLM",
            "FalconH1ForCausalLM",
            "FalconMambaForCausalLM",
            "GraniteMoeHybridForCausalLM",
            "JambaForCausalLM",
            "Mamba2ForCausalLM",
            "MambaForCausalLM",
            "NemotronHForCausalLM",
            "Zamba2ForCausalLM",
        ),
        _STATE_SPACE,
    ),
}
"""Reasons why architectures are not supported."""

TEACHER_ALONE = (
    "as a teacher, transformers runs any architecture of its own: teacher.library: huggingface"
)
"""What an architecture that is not read can still be used for."""

"""The text model in a checkpoint that reads images too: its configuration and its tensors.

``config.json`` of such a checkpoint has the text model's keys under ``text_config`` (the first of
Qwen2-VL beside the others), and its tensors have a prefix. Without images these text models compute
what a family of their own does: positions that count time, height and width (``mrope``) are then
three equal numbers, and masks are causal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

WRAPPERS: Final = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Architectures that read images, whose text model is of a family."""

_TEXT_MODELS: Final[Mapping[str, tuple[str, str]]] = {
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_text"),
    "granite": ("GraniteForCausalLM", "granite"),
    "llama": ("LlamaForCausalLM", "llama"),
    "ministral3": ("Ministral3ForCausalLM", "ministral3"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_vl": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_vl": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3_vl_text": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}
"""Architecture and type of the text model alone, by its type in the checkpoint."""

_SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "ministral3": {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "max_position_embeddings": 262_144,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
    },
}
"""Sizes that published checkpoints leave out: transformers' defaults of these types."""

_PREFIXES: Final = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.": "model.",
    "lm_head.": "lm_head.",
}
"""What names of the text model's tensors begin with, and what is there in the text model alone."""

_OTHER_PARTS: Final = (
    *("visual.", "vision_tower.", "multi_modal_projector.", "image_newline"),
    *(
        "model.visual.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "model.image_newline",
    ),
)
"""What names of the other parts' tensors begin with."""

_TIED: Final = "tie_word_embeddings"
_QUANTISED: Final = "quantization_config"
_OF_POSITIONS: Final = ("mrope_section", "mrope_interleaved")


def wraps_text(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of a checkpoint whose text model is read."""
    names = config.get("architectures") or []
    return any(name in WRAPPERS for name in names) and _kind(config) in _TEXT_MODELS


def text_config(config: Mapping[str, Any], tensors: Iterable[str] | None) -> dict[str, Any]:
    """The ``config.json`` of the text model alone.

    Args:
        config: One that ``wraps_text``.
        tensors: Names of the checkpoint's tensors, which tell whether there is a head; None where
            there are none.
    """
    kind, inner = _kind(config), dict(config.get("text_config") or config)
    architecture, model_type = _TEXT_MODELS[kind]
    found = {
        **_SIZES.get(kind, {}),
        **{key: value for key, value in inner.items() if not _is_of_images(key)},
        "architectures": [architecture],
        "model_type": model_type,
    }
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), Mapping):
            found[key] = _of_text(found[key])
    if tensors is not None:
        found[_TIED] = not any(name.endswith("lm_head.weight") for name in tensors)
    elif _TIED not in inner and _TIED in config:
        found[_TIED] = config[_TIED]
    if _QUANTISED in config:
        found[_QUANTISED] = config[_QUANTISED]
    dtype = config.get("dtype") or config.get("torch_dtype")
    return found if dtype is None else {"torch_dtype": dtype, **found}


def text_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each of the text model's tensors, and its name in the text model alone.

    A tensor of no known part is given by its own name, for the check of names to find.
    """
    for name in names:
        if not name.startswith(_OTHER_PARTS):
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
            yield name, _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def _kind(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        # LLaVA's text models are Llama's where nothing is said.
        return str(inner.get("model_type", "llama"))
    return str(config.get("model_type"))


def _is_of_images(key: str) -> bool:
    return key.startswith(("vision_", "image_", "video_", "text_config"))


def _of_text(rotary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary embeddings without the division of positions; None where nothing else is said."""
    rest = {key: value for key, value in rotary.items() if key not in _OF_POSITIONS}
    for key in ("type", "rope_type"):
        if rest.get(key) in ("mrope", "default") and "rope_theta" not in rest:
            del rest[key]
        elif rest.get(key) == "mrope":
            rest[key] = "default"
    return rest or None

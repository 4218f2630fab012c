"""The prompt formats by name: a row, a template and a golden each."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from megatron_ext.conversation.prompt_format import TEMPLATE_FILE, PromptConfig, PromptFormat
from megatron_ext.conversation.protocol import ConversationTokenizer
from megatron_ext.errors import ConfigError
from megatron_ext.registry import Registry


class PromptFormatRegistry(Registry[Callable[[ConversationTokenizer], PromptConfig]]):
    """Prompt formats by name; ``file:PATH`` is the template in a file."""

    def __getitem__(self, name: str) -> Callable[[ConversationTokenizer], PromptConfig]:
        if not name.startswith(TEMPLATE_FILE):
            return super().__getitem__(name)
        return PromptFormat(name=name, template=name, pad=_OWN_PAD)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and name.startswith(TEMPLATE_FILE)
        )


_QWEN_SYSTEM: Final = MappingProxyType(
    {
        "role": "system",
        "content": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    }
)
_OWN_PAD: Final = ("pad_id", "eos_id")
_UNK_PAD: Final = ("<unk>", "unk_id", *_OWN_PAD)
_CHATML: Final = ("<|im_start|>", "<|im_end|>")
_IMAGES: Final = {"validate_no_image_in_assistant": True}
_WITHOUT_TOOLS: Final = {"allow_tool_role": False}
_NEMOTRON_H: Final = ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
_LLAMA3: Final = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

PROMPT_FORMAT_REGISTRY: Final = PromptFormatRegistry("prompt format")
"""Name -> what makes a ``PromptConfig`` for a tokenizer."""

for _row in (
    PromptFormat(name="default", pad=_OWN_PAD, options={"skip_masking": True}),
    PromptFormat(name="auto", pad=_OWN_PAD),
    PromptFormat(name="identity", template="identity", pad=_UNK_PAD),
    PromptFormat(
        name="nemotron-nano-v2",
        template="nemotron-nano-v2",
        pad=_UNK_PAD,
        tokens=_NEMOTRON_H,
        options=_WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="nemotron-h-aligned",
        template="nemotron-h-aligned",
        pad=("<SPECIAL_233>",),
        tokens=("<SPECIAL_10>", "<SPECIAL_11>"),
        options=_WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="mistral",
        template="mistral",
        pad=("unk_id", *_OWN_PAD),
        special_tokens=("bos_token", "eos_token"),
        options=_IMAGES | _WITHOUT_TOOLS | {"has_system_role": False},
    ),
    PromptFormat(name="llama3", pad=("<|end_of_text|>",), options=_IMAGES),
    *(
        PromptFormat(
            name=name,
            template="llama3p1",
            pad=("<|finetune_right_pad_id|>",),
            tokens=_LLAMA3,
            special_tokens=("bos_token",),
            options=_IMAGES,
        )
        for name in ("llama3p1", "llama3p2")
    ),
    PromptFormat(
        name="nvlm-yi-34b",
        template="nvlm-yi-34b",
        tokens=_CHATML,
        special_tokens=("bos_token",),
        options=_IMAGES,
    ),
    PromptFormat(name="chatml", tokens=_CHATML, options=_IMAGES | {"has_bos": False}),
    PromptFormat(
        name="nemotron5",
        template="nemotron5",
        pad=("<SPECIAL_233>",),
        tokens=("<SPECIAL_14>", "<SPECIAL_15>"),
        special_tokens=("bos_token",),
        options=_IMAGES,
    ),
    PromptFormat(
        name="nemotron5-aligned",
        template="nemotron5-aligned",
        pad=("<SPECIAL_233>",),
        tokens=("[PREFIX]",),
        special_tokens=("bos_token",),
        options=_IMAGES | {"capitalize_roles": True},
    ),
    *(
        PromptFormat(
            name=name,
            template="chatml",
            tokens=_CHATML,
            options=_IMAGES | {"system_default": _QWEN_SYSTEM},
        )
        for name in ("qwen2p0", "qwen2p5")
    ),
    PromptFormat(name="nemotron6-moe", pad=_UNK_PAD, options=_IMAGES),
    PromptFormat(
        name="llama_nemotron_8b",
        template="llama_nemotron_8b",
        pad=("<|end_of_text|>",),
        tokens=_LLAMA3,
        special_tokens=("bos_token",),
        options=_IMAGES,
    ),
    PromptFormat(
        name="nemotron-h-reasoning",
        template="nemotron-h-reasoning",
        pad=("<SPECIAL_11>",),
        tokens=("<SPECIAL_10>", "<SPECIAL_11>"),
        options=_IMAGES | _WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="nemotron-h-5p5-reasoning",
        template="nemotron-nano-v2",
        pad=_UNK_PAD,
        tokens=_NEMOTRON_H,
        options=_IMAGES | _WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="nemotron-h-5p5-reasoning-inference",
        template="nemotron-h-5p5-reasoning-inference",
        pad=_UNK_PAD,
        tokens=_NEMOTRON_H,
        options=_IMAGES,
    ),
    *(
        PromptFormat(
            name=name,
            template=name,
            pad=("<|finetune_right_pad_id|>",),
            tokens=_LLAMA3,
            special_tokens=("bos_token",),
            options=_IMAGES,
        )
        for name in ("llama-nemotron-super", "llama-nemotron-super-1p5")
    ),
):
    PROMPT_FORMAT_REGISTRY.register(_row.name, _row)


def prompt_config_of(name: str, tokenizer: ConversationTokenizer) -> PromptConfig:
    """The prompt format ``name`` for a tokenizer.

    Raises:
        ConfigError: There is no such format, or it does not fit the vocabulary.
    """
    return PROMPT_FORMAT_REGISTRY[name](tokenizer)


def fitting_formats(tokenizer: ConversationTokenizer) -> list[str]:
    """Names of the prompt formats that a tokenizer can have."""
    return [name for name in PROMPT_FORMAT_REGISTRY if _fits(name, tokenizer)]


def _fits(name: str, tokenizer: ConversationTokenizer) -> bool:
    try:
        prompt_config_of(name, tokenizer)
    except ConfigError:
        return False
    return True

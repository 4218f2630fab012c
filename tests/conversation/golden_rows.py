"""The conversations that Megatron-LM tokenizes and masks at commit d98e8a6, and where we differ.

``DIFFERENCES`` lists every class of rows in which we do not give the original's ids and mask;
``docs/prompt_formats.md`` shows the same list with the same numbers.
"""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Literal

from megatron_ext.conversation import (
    EncodedConversation,
    PromptConfig,
    encode_conversation,
    image_tags,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer
from tests.conversation.shared_files import SHARED, published_tokenizer

Row = dict[str, Any]

FORMATS: Final = [
    ("sft", "default", "gemma3"),
    ("sft", "default", "llama3_2"),
    ("multimodal", "llama3p1", "llama3_2"),
    ("multimodal", "llama3p2", "llama3_2"),
    ("multimodal", "llama3", "llama3"),
    ("multimodal", "mistral", "mistral_7b_v1"),
    ("multimodal", "mistral", "mistral_nemo"),
    ("multimodal", "nemotron5", "mistral_nemo"),
    ("multimodal", "nemotron5-aligned", "mistral_nemo"),
    ("sft", "identity", "mistral_nemo"),
    ("sft", "nemotron-h-aligned", "mistral_nemo"),
    ("sft", "nemotron-nano-v2", "mistral_nemo"),
    ("sft", "default", "qwen2_5"),
    ("multimodal", "chatml", "qwen2_5"),
    ("multimodal", "qwen2p0", "qwen2_5"),
    ("multimodal", "qwen2p5", "qwen2_5"),
    ("sft", "identity", "qwen3"),
    ("multimodal", "qwen2p5", "qwen3"),
]
"""Kind, prompt format and tokenizer of every row, by tokenizer."""

LLAMA3_HEADER: Final = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA3_TEMPLATE: Final = (
    "{% for m in messages %}{{ bos_token if loop.first }}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    f"{{{{ {LLAMA3_HEADER!r} }}}}"
)
"""What Llama 3's own template writes; Llama 3.2's vocabulary gives this text the same ids."""


@cache
def rows() -> list[Row]:
    with gzip.open(SHARED / "golden" / "conversations.json.gz", "rt", encoding="utf-8") as file:
        golden: list[Row] = json.load(file)
    return golden


def rows_of(kind: str, name: str, tokenizer: str) -> list[Row]:
    wanted = (kind, name, tokenizer)
    return [r for r in rows() if (r["kind"], r["prompt_format"], r["tokenizer"]) == wanted]


def tokenizer_of(row: Row) -> HuggingFaceTokenizer:
    name = row["tokenizer"]
    return published_tokenizer("llama3_2" if name == "llama3" else name)


def config_of(row: Row) -> PromptConfig:
    config = prompt_config_of(row["prompt_format"], tokenizer_of(row))
    if row["prompt_format"] == "llama3":
        config = replace(config, custom_chat_template=LLAMA3_TEMPLATE)
    return replace(
        config,
        force_system_message=row["force_system_message"],
        # The day on which the rows were made.
        template_variables={"date_string": "20 Nov 2026"},
    )


def tokenized(row: Row) -> Any:
    """Ids of a row that is to go on from; ids and target of one that is to be trained."""
    return tokenize_conversation(
        tokenizer_of(row),
        row["conversation"],
        config_of(row),
        is_trained(row),
        row["add_generation_prompt"],
        _tag(row),
    )


def encoded(row: Row) -> EncodedConversation:
    """The same with everything that is known of it."""
    return encode_conversation(
        tokenizer_of(row),
        row["conversation"],
        config_of(row),
        add_generation_prompt=row["add_generation_prompt"],
        apply_image_tag_fn=_tag(row),
    )


def is_trained(row: Row) -> bool:
    return not row["add_generation_prompt"]


def _tag(row: Row) -> Callable[[str], str] | None:
    return image_tags(row["image_tag_type"]) if row["kind"] == "multimodal" else None


@dataclass(frozen=True)
class Difference:
    """Rows in which we do something else than the original."""

    reason: str
    """What the original does, and we instead, as the documentation says it."""
    is_one: Callable[[Row], bool]
    """Whether a row belongs here, if to no difference before."""
    what: Literal["refused", "ids", "mask", "raises"]
    """We refuse the row; our ids are others; our mask is another; only the original raises."""
    refused: str = ""
    """What our error says."""


def is_refused_alike(row: Row) -> str | None:
    """What our error says of a row that the original refuses as well, each for its own reason."""
    if "tokens_error" in row:
        return {
            "assistant_first": "the assistant speaks first",
            "unknown_role": "unknown role",
            "tool": "refuses the conversation; got TemplateError",
        }[row["conversation_id"]]
    if row["conversation_id"] == "empty_assistant" and "target_error" in row:
        return "the assistant says nothing"
    if row["conversation_id"] == "image_in_assistant" and "target_error" in row:
        return "holds <image>"
    return None


DIFFERENCES: Final = [
    Difference(
        "The assistant speaks first. The original trains on it in some formats and raises in "
        "others; we refuse.",
        lambda row: row["conversation_id"] == "assistant_first",
        "refused",
        "the assistant speaks first",
    ),
    Difference(
        "A role is unknown. The original trains on it in some formats and raises in others; we "
        "refuse.",
        lambda row: row["conversation_id"] == "unknown_role",
        "refused",
        "unknown role",
    ),
    Difference(
        "A tool speaks in a format that has no place for it. The original leaves out what it says; "
        "we refuse.",
        lambda row: (
            row["conversation_id"] == "tool"
            and row["prompt_format"] in ("mistral", "nemotron-nano-v2", "nemotron-h-aligned")
        ),
        "refused",
        "has no place for what a tool says",
    ),
    Difference(
        "The tokenizer's own template writes more around one message alone than in a conversation. "
        "The original compares the two and raises; we give ids and mask.",
        lambda row: row["prompt_format"] in ("chatml", "llama3") and "target_error" in row,
        "raises",
    ),
    Difference(
        "A token holds the end of one message and the beginning of the next (`identity`). The "
        "original raises; we train the tokens that hold nothing but the answer.",
        lambda row: row["prompt_format"] == "identity" and "target_error" in row,
        "raises",
    ),
    Difference(
        "A tool speaks in a multimodal format. The original trains on what it says; we do not.",
        lambda row: (
            row["kind"] == "multimodal" and row["conversation_id"] == "tool" and "target" in row
        ),
        "mask",
    ),
    Difference(
        "The header of an answer is four tokens long (`nemotron5`). The original takes it for "
        "three and trains the fourth; we do not.",
        lambda row: row["prompt_format"] == "nemotron5" and "target" in row,
        "mask",
    ),
    Difference(
        "Text begins with a space after a control token (Mistral 7B v0.1). The original rebuilds "
        "the tokenizer, which then writes one space less; we give the ids of the tokenizer's file.",
        lambda row: (
            row["tokenizer"] == "mistral_7b_v1"
            and re.search(r"(</s>|<image>|</?img>) ", encoded(row).text) is not None
        ),
        "ids",
    ),
]
"""Every class of rows in which we differ, the first that fits counts."""


def difference_of(row: Row) -> Difference | None:
    """The class that a row belongs to; None where ids and mask must be the original's."""
    if is_refused_alike(row):
        return None
    return next((d for d in DIFFERENCES if d.is_one(row)), None)

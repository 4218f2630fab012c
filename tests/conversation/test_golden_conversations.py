"""The conversations that Megatron-LM tokenizes and masks at commit d98e8a6, id for id.

Where the original raises, or masks wrongly, ``DEFECTS`` says which rows and why; there the mask is
held to the text that must be trained instead.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from shared_files import SHARED, needs_shared, published_tokenizer

from megatron_ext.conversation import (
    IGNORE_INDEX,
    PromptConfig,
    image_tags,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.errors import ConversationError
from megatron_ext.tokenizers.libraries.huggingface.tokenizer import HuggingFaceTokenizer

Row = dict[str, Any]

FORMATS = [
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
"""Kind, prompt format and tokenizer of every row whose tokenizer is at hand, by tokenizer."""

LLAMA3_TEMPLATE = (
    "{% for m in messages %}{{ bos_token if loop.first }}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
"""What Llama 3's own template writes; Llama 3.2's vocabulary gives this text the same ids."""

REFUSED: dict[str, Callable[[Row], bool]] = {
    "the original looks for the message before the first one at the end": lambda row: (
        row["conversation_id"] == "assistant_first"
    ),
    "the original trains on unknown roles, or fails after tokenizing them": lambda row: (
        row["conversation_id"] == "unknown_role"
    ),
    "the original drops what a tool says without a word": lambda row: (
        row["conversation_id"] == "tool"
        and row["prompt_format"] in ("mistral", "nemotron-nano-v2", "nemotron-h-aligned")
    ),
    "the template itself wants roles to alternate": lambda row: "tokens_error" in row,
}
"""Rows that we refuse to tokenize, whatever the original does."""

OTHER_TOKENS: dict[str, Callable[[Row], bool]] = {
    "the original rebuilds this tokenizer and loses a space after a control token": lambda row: (
        row["tokenizer"] == "mistral_7b_v1"
        and (row["add_generation_prompt"] or row["conversation_id"] == "image")
    ),
}
"""Rows whose ids are not those that the tokenizer's own file gives."""

OTHER_TARGETS: dict[str, Callable[[Row], bool]] = {
    "the original trains on what a tool says": lambda row: (
        row["kind"] == "multimodal" and row["conversation_id"] == "tool"
    ),
    "the original takes a header of four tokens for three and trains the fourth": lambda row: (
        row["prompt_format"] == "nemotron5"
    ),
}
"""Rows whose mask is wrong."""

UNTRAINABLE = ("empty_assistant", "image_in_assistant")
"""Conversations with nothing to train, or with an image where none may be."""


@cache
def rows() -> list[Row]:
    with gzip.open(SHARED / "golden" / "conversations.json.gz", "rt", encoding="utf-8") as file:
        golden: list[Row] = json.load(file)
    return golden


def rows_of(kind: str, name: str, tokenizer: str) -> list[Row]:
    wanted = (kind, name, tokenizer)
    return [r for r in rows() if (r["kind"], r["prompt_format"], r["tokenizer"]) == wanted]


@pytest.fixture(scope="module", params=FORMATS, ids=["-".join(row) for row in FORMATS])
def golden_rows(request: pytest.FixtureRequest) -> list[Row]:
    """The rows of one format and tokenizer; a module's fixture, so that tokenizers take turns."""
    return rows_of(*request.param)


def is_among(row: Row, reasons: dict[str, Callable[[Row], bool]]) -> bool:
    return any(applies(row) for applies in reasons.values())


def tokenizer_of(row: Row) -> HuggingFaceTokenizer:
    name = row["tokenizer"]
    return published_tokenizer("llama3_2" if name == "llama3" else name)


def config_of(row: Row) -> PromptConfig:
    config = prompt_config_of(row["prompt_format"], tokenizer_of(row))
    assert config.pad_token_id == row["pad_id"]
    if row["prompt_format"] == "llama3":
        config = replace(config, custom_chat_template=LLAMA3_TEMPLATE)
    return replace(
        config,
        force_system_message=row["force_system_message"],
        # The day on which the rows were made.
        template_variables={"date_string": "20 Nov 2026"},
    )


def tokenized(row: Row, return_target: bool) -> Any:
    return tokenize_conversation(
        tokenizer_of(row),
        row["conversation"],
        config_of(row),
        return_target,
        row["add_generation_prompt"],
        image_tags(row["image_tag_type"]) if row["kind"] == "multimodal" else None,
    )


@needs_shared
def test_ids_are_those_of_the_original(golden_rows: list[Row]) -> None:
    compared = 0
    for row in golden_rows:
        if is_among(row, REFUSED):
            with pytest.raises(ConversationError, match=r"^conversation\[\d\]: "):
                tokenized(row, False)
        elif not is_among(row, OTHER_TOKENS):
            assert tokenized(row, False).tolist() == row["tokens"], row["conversation_id"]
            compared += 1
    assert compared >= 16


@needs_shared
def test_masks_are_those_of_the_original_where_it_has_them_right(golden_rows: list[Row]) -> None:
    compared = 0
    for row in golden_rows:
        if is_among(row, REFUSED | OTHER_TOKENS | OTHER_TARGETS) or "target" not in row:
            continue
        ids, target = tokenized(row, True)
        assert ids.tolist() == row["tokens"], row["conversation_id"]
        assert target.tolist() == row["target"], row["conversation_id"]
        compared += 1
    # What the own templates of the first two put before and after a turn, the original takes for
    # a part of it.
    name = golden_rows[0]["prompt_format"]
    assert compared >= (0 if name in ("chatml", "llama3", "nemotron5") else 12)


STOPS = {
    "identity": "",
    "nemotron-nano-v2": "\n<SPECIAL_12>\n",
    "nemotron-h-aligned": "\n",
    "llama3": "<|eot_id|>",
    "llama3p1": "<|eot_id|>",
    "llama3p2": "<|eot_id|>",
    "mistral": "</s>",
    "nemotron5": "<SPECIAL_15>\n",
    "nemotron5-aligned": "\n[PREFIX]",
    "chatml": "<|im_end|>\n",
    "qwen2p0": "<|im_end|>\n",
    "qwen2p5": "<|im_end|>\n",
}
TRIMMED = ("nemotron-nano-v2", "nemotron-h-aligned", "llama3", "llama3p1", "llama3p2")


@needs_shared
def test_in_every_row_what_the_assistant_says_is_trained_with_its_stop_marker(
    golden_rows: list[Row],
) -> None:
    name = golden_rows[0]["prompt_format"]
    for row in golden_rows:
        if is_among(row, REFUSED) or row["conversation_id"] in UNTRAINABLE or name == "default":
            continue
        _, target = tokenized(row, True)
        trained = tokenizer_of(row).ids_to_text(target[target != IGNORE_INDEX].tolist())
        answers = [m["content"] for m in row["conversation"] if m["role"] == "assistant"]
        if name in TRIMMED:
            answers = [answer.strip() for answer in answers]
        expected = "".join(
            f"{' ' * (name == 'mistral')}{answer}{STOPS[name]}" for answer in answers
        )
        if name == "identity":
            # A token that an answer shares with the question beside it is not trained.
            characters = iter(expected)
            assert all(character in characters for character in trained)
            assert 2 * len(trained) >= len(expected)
        else:
            assert trained.split() == expected.split(), row["conversation_id"]


@needs_shared
def test_what_cannot_be_trained_is_refused(golden_rows: list[Row]) -> None:
    for row in golden_rows:
        if row["conversation_id"] == "empty_assistant" and row["prompt_format"] != "default":
            with pytest.raises(ConversationError, match=r"^conversation\[1\]: the assistant says"):
                tokenized(row, True)
        if row["conversation_id"] == "image_in_assistant" and row["kind"] == "multimodal":
            with pytest.raises(ConversationError, match=r"^conversation\[1\]: .* holds <image>"):
                tokenized(row, True)


@needs_shared
def test_every_row_at_hand_belongs_to_a_format_above() -> None:
    known = {(r["kind"], r["prompt_format"], r["tokenizer"]) for r in rows()}
    assert known == set(FORMATS)

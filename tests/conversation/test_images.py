"""Images become image tokens wherever their format puts tags, once, and only images do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_ext.conversation import (
    DEFAULT_IMAGE_TOKEN_INDEX,
    IGNORE_INDEX,
    IMAGE_TOKEN,
    image_tags,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.errors import ConfigError, ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer

CONVERSATION = [
    {"role": "user", "content": "See <image> and <image>: <|im_end|> <img>"},
    {"role": "assistant", "content": "Two."},
]
TAGGED = {
    "nvlm": "See <Image><image></Image> and <Image><image></Image>: <|im_end|> <img>",
    "internvl": "See <img><image></img> and <img><image></img>: <|im_end|> <img>",
    "none": CONVERSATION[0]["content"],
    "": CONVERSATION[0]["content"],
}


def control_names(tokenizer: ByteTokenizer, ids: np.ndarray[Any, Any]) -> list[str]:
    return [tokenizer.decode([i]) for i in ids.tolist() if tokenizer.is_control(i)]


@pytest.mark.parametrize(("kind", "expected"), TAGGED.items(), ids=TAGGED)
def test_tags_stand_around_each_image_once(kind: str, expected: str) -> None:
    tags = image_tags(kind)
    assert tags(CONVERSATION[0]["content"]) == expected
    assert tags(expected) == expected


@pytest.mark.parametrize(
    ("kind", "image"),
    [("internvl", ["<img>", "<image>", "</img>"]), ("nvlm", ["<image>"]), ("", ["<image>"])],
)
def test_images_become_control_tokens_and_no_other_content_does(
    kind: str, image: list[str]
) -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    ids, target = tokenize_conversation(
        tokenizer, CONVERSATION, config, True, False, image_tags(kind)
    )
    around = ["<|im_start|>", "<|im_end|>"]
    assert control_names(tokenizer, ids) == [around[0], *image, *image, around[1], *around]
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\n{TAGGED[kind]}<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
    )
    assert tokenizer.decode(target[target != IGNORE_INDEX]) == "Two.<|im_end|>\n"


def test_tagging_a_conversation_twice_changes_nothing() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    tags = image_tags("internvl")
    once = [CONVERSATION[0] | {"content": tags(CONVERSATION[0]["content"])}, CONVERSATION[1]]
    ids = tokenize_conversation(tokenizer, CONVERSATION, config, False, False, tags)
    again = tokenize_conversation(tokenizer, once, config, False, False, tags)
    np.testing.assert_array_equal(ids, again)


def test_an_image_completes_no_control_token_of_the_template() -> None:
    tokenizer = ByteTokenizer(
        "<|im_{{ messages[0].content }}", control_tokens=["<|im_<image>|>", IMAGE_TOKEN]
    )
    tokenizer.special_token_names = {}
    config = prompt_config_of("default", ByteTokenizer("x"))
    conversation = [{"role": "user", "content": "<image>|>"}]
    ids = tokenize_conversation(tokenizer, conversation, config, False, False, image_tags(""))
    assert control_names(tokenizer, ids) == [IMAGE_TOKEN]


def test_without_images_the_image_token_is_text() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("identity", tokenizer)
    ids = tokenize_conversation(tokenizer, CONVERSATION, config, False, False)
    assert control_names(tokenizer, ids) == []


def test_an_image_in_an_answer_is_refused_for_training_only() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    conversation = [CONVERSATION[0], {"role": "assistant", "content": "<image>"}]
    tokenize_conversation(tokenizer, conversation, config, False, False, image_tags(""))
    with pytest.raises(
        ConversationError, match=r"^conversation\[1\]: an assistant message holds <image>"
    ):
        tokenize_conversation(tokenizer, conversation, config, True, False, image_tags(""))


def test_an_unknown_tag_type_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ConfigError, match="got 'nvml'; expected one of nvlm, internvl, none; did you mean 'nvlm'"
    ):
        image_tags("nvml")


def test_the_constants_are_megatron_s() -> None:
    assert (IGNORE_INDEX, IMAGE_TOKEN, DEFAULT_IMAGE_TOKEN_INDEX) == (-100, "<image>", -200)

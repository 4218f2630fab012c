"""Contents may be lists of parts and show images, whether the template takes them or not."""

from typing import Any

import numpy as np
import pytest

from megatron_ext.conversation import (
    DEFAULT_IMAGE_TOKEN_INDEX,
    IGNORE_INDEX,
    IMAGE_TOKEN,
    encode_conversation,
    image_tags,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.conversation.shown_conversation import takes_parts
from megatron_ext.errors import ConfigError, ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}<|im_end|>{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)
USERS_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ m.content + '' }}{% endif %}<|im_end|>{% endfor %}"
)
NAMES = ("<s>", "</s>", "<unk>", "<pad>", "<|im_end|>", "<|image|>", "<image>", "<img>", "</img>")


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [text_part("Wie "), text_part("geht's? <|im_end|>")]},
    {"role": "assistant", "content": [text_part("Gut"), text_part(".")]},
]
IMAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [text_part("Was ist "), {"type": "image"}, text_part("?")]},
    {"role": "assistant", "content": "Ein Hund."},
]


def tokenizer_of(template: str) -> ByteTokenizer:
    return ByteTokenizer(template, control_tokens=NAMES)


@pytest.mark.parametrize("template", [PLAIN, PARTS, USERS_PARTS])
def test_parts_of_text_read_as_the_text(template: str) -> None:
    tokenizer = tokenizer_of(template)
    config = prompt_config_of("auto", tokenizer)
    whole = [m | {"content": "".join(part["text"] for part in m["content"])} for m in CONVERSATION]
    in_parts = tokenize_conversation(tokenizer, CONVERSATION, config, True, False)
    as_text = tokenize_conversation(tokenizer, whole, config, True, False)
    for ours, theirs in zip(in_parts, as_text, strict=True):
        assert ours.tolist() == theirs.tolist()
    _, target = in_parts
    assert tokenizer.decode(target[target >= 0].tolist()) == "Gut.<|im_end|>"


def test_it_is_told_from_the_template_whose_parts_it_takes() -> None:
    for template, roles in ((PLAIN, ""), (PARTS, "user assistant system"), (USERS_PARTS, "user")):
        taken = [
            role
            for role in ("user", "assistant", "system")
            if takes_parts(template, role, ["text"], {})
        ]
        assert sorted(taken) == sorted(roles.split())


def test_a_template_writes_its_own_images_as_control_tokens() -> None:
    tokenizer = tokenizer_of(PARTS)
    encoded = encode_conversation(tokenizer, IMAGES, prompt_config_of("auto", tokenizer))
    assert encoded.text == "user:Was ist <|image|>?<|im_end|>assistant:Ein Hund.<|im_end|>"
    assert encoded.ids.tolist().count(tokenizer.token_to_id("<|image|>")) == 1


def test_images_have_their_place_and_tags_where_the_template_takes_text_alone() -> None:
    tokenizer = tokenizer_of(PLAIN)
    config = prompt_config_of("auto", tokenizer)
    tags = image_tags("internvl")
    encoded = encode_conversation(tokenizer, IMAGES, config, apply_image_tag_fn=tags)
    assert encoded.text.startswith("user:Was ist <img><image></img>?<|im_end|>")
    assert tokenizer.token_to_id("<image>") in encoded.ids.tolist()
    with pytest.raises(
        ConversationError, match=r"^conversation\[0\].content\[1\]: neither .*image"
    ):
        encode_conversation(tokenizer, IMAGES, config)


def test_callers_lists_stay_as_they_are() -> None:
    tokenizer = tokenizer_of(PLAIN)
    before = repr(CONVERSATION)
    tokenize_conversation(tokenizer, CONVERSATION, prompt_config_of("auto", tokenizer), True, False)
    assert repr(CONVERSATION) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"text": "x"}], r"^conversation\[0\].content\[0\]: this is not a part of a content"),
        ([text_part("x"), "y"], r"^conversation\[0\].content\[1\]: this is not a part"),
        ([{"type": "text"}], r"^conversation\[0\].content\[0\]: this is not a part"),
        ([{"type": "audio"}], r"^conversation\[0\].content\[0\]: neither the template"),
        ([text_part("\ud800")], r"^conversation\[0\].content\[0\]: .*lone surrogate"),
        (7, r"^conversation\[0\]: the content is not text; got int"),
    ],
)
def test_what_is_no_content_is_refused_with_its_place(content: Any, message: str) -> None:
    tokenizer = tokenizer_of(PLAIN)
    conversation = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    with pytest.raises(ConversationError, match=message):
        encode_conversation(tokenizer, conversation, prompt_config_of("auto", tokenizer))


def test_a_part_that_the_template_would_leave_out_is_refused_or_becomes_text() -> None:
    template = PARTS.replace("{% elif part.type == 'image' %}<|image|>", "")
    tokenizer = tokenizer_of(template)
    config = prompt_config_of("auto", tokenizer)
    with pytest.raises(
        ConversationError, match=r"^conversation\[0\].content\[1\]: neither .*image"
    ):
        encode_conversation(tokenizer, IMAGES, config)
    encoded = encode_conversation(tokenizer, IMAGES, config, apply_image_tag_fn=image_tags(""))
    assert encoded.text.startswith("user:Was ist <image>?<|im_end|>")


def test_an_image_that_is_written_in_a_part_of_text_is_an_image() -> None:
    tokenizer = tokenizer_of(PARTS)
    messages = [{"role": "user", "content": [text_part("<image>Was?")]}, IMAGES[1]]
    encoded = encode_conversation(
        tokenizer,
        messages,
        prompt_config_of("auto", tokenizer),
        apply_image_tag_fn=image_tags("internvl"),
    )
    assert encoded.text.startswith("user:<img><image></img>Was?")
    assert encoded.ids.tolist().count(tokenizer.token_to_id("<image>")) == 1


TWO_IMAGES = [
    {"role": "user", "content": "See <image> and <image>: <|im_end|> <img>"},
    {"role": "assistant", "content": "Two."},
]
TAGGED = {
    "nvlm": "See <Image><image></Image> and <Image><image></Image>: <|im_end|> <img>",
    "internvl": "See <img><image></img> and <img><image></img>: <|im_end|> <img>",
    "none": TWO_IMAGES[0]["content"],
    "": TWO_IMAGES[0]["content"],
}


def control_names(tokenizer: ByteTokenizer, ids: np.ndarray[Any, Any]) -> list[str]:
    return [tokenizer.decode([i]) for i in ids.tolist() if tokenizer.is_control(i)]


@pytest.mark.parametrize(("kind", "expected"), TAGGED.items(), ids=TAGGED)
def test_tags_stand_around_each_image_once(kind: str, expected: str) -> None:
    tags = image_tags(kind)
    assert tags(TWO_IMAGES[0]["content"]) == expected
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
        tokenizer, TWO_IMAGES, config, True, False, image_tags(kind)
    )
    around = ["<|im_start|>", "<|im_end|>"]
    assert control_names(tokenizer, ids) == [around[0], *image, *image, around[1], *around]
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\n{TAGGED[kind]}<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
    )
    assert tokenizer.decode(target[target != IGNORE_INDEX]) == "Two.<|im_end|>\n"


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
    ids = tokenize_conversation(tokenizer, TWO_IMAGES, config, False, False)
    assert control_names(tokenizer, ids) == []


def test_an_image_in_an_answer_is_refused_for_training_only() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    conversation = [TWO_IMAGES[0], {"role": "assistant", "content": "<image>"}]
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
